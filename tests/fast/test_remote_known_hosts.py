"""Which host is tried next: decisions on a clock of the test."""

from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.known_hosts import HostState, KnownHost, choose, complaints, is_played_nowhere
from headrace.actors.remote.protocol import Hello


def known(address, capacity=0, sessions=0, version="1", now=0.0, ours=0):
    host = KnownHost(address=address, ours=ours)
    if capacity:
        host.greeted(Hello(environment="e", version=version, capacity=capacity, sessions=sessions), now)
    return host


def test_the_host_with_the_most_free_places():
    hosts = [known("a", 10, 9), known("b", 10, 2), known("c", 4, 0)]
    assert choose(hosts, (), 0.0) is hosts[1]
    hosts[1].ours = 7
    assert choose(hosts, (), 0.0) is hosts[2]
    hosts[2].ours = 4
    assert choose(hosts, (), 0.0) is hosts[0]
    hosts[0].ours = 1
    assert choose(hosts, (), 0.0) is hosts[1]
    for host in hosts:
        host.ours = 10
    assert choose(hosts, (), 0.0) is None


def test_a_host_of_unknown_size_is_tried_by_a_few_until_it_has_answered():
    host = known("a")
    taken = 0
    while choose([host], (), 0.0) is host:
        host.ours += 1
        taken += 1
    assert taken == 8
    host.greeted(Hello(environment="e", version="1", capacity=64, sessions=20), 0.0)
    assert (host.others, host.free(0.0)) == (12, 44)


def test_a_host_that_nobody_has_tried_comes_first():
    hosts = [known("a", 64), known("b")]
    assert choose(hosts, (), 0.0) is hosts[1]
    hosts[1].ours = 1
    assert choose(hosts, (), 0.0) is hosts[0]


def test_a_group_stays_with_its_version():  # P17
    hosts = [known("a", 64, version="1"), known("b", 2, version="2")]
    assert choose(hosts, ("2",), 0.0) is hosts[1]
    assert choose(hosts, ("3",), 0.0) is None
    assert is_played_nowhere(hosts, "3", 0.0)
    assert not is_played_nowhere(hosts, "2", 0.0)
    assert not is_played_nowhere([*hosts, known("c")], "3", 0.0)  # not asked yet
    assert not is_played_nowhere([], "3", 0.0)


def test_what_a_host_said_is_believed_for_a_while_only():
    host = known("a", 4, 4, version="1", now=0.0)
    assert choose([host], ("2",), 1.0) is None
    assert choose([host], ("2",), 60.0) is host  # it may have come back as another
    host.ours = 1
    assert choose([host], ("2",), 60.0) is None  # as long as we play there it has not


def test_who_fails_is_left_alone_longer_each_time_but_not_for_long():
    host = known("a", 4)
    pauses, now = [], 0.0
    for _ in range(8):
        host.failed(HostState.AWAY, "refused", now)
        assert choose([host], (), now) is None
        pauses.append(host.not_before_s - now)
        now = host.not_before_s
        assert choose([host], (), now) is host
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.25, 5.0)
    host.greeted(Hello(environment="e", version="1", capacity=4), now)
    assert host.failures == 0


def test_hosts_that_leave_are_not_tried():
    host = known("a", 4)
    host.has_left = True
    assert choose([host], (), 0.0) is None


def test_each_host_says_why():
    hosts = [known("a"), known("b", 2, version="1"), known("c")]
    hosts[2].failed(HostState.AWAY, "c: connection refused", 0.0)
    told = complaints(hosts, ("2",))
    assert told == "a: not tried yet; b: plays version 1; c: connection refused"
    many = [known(str(n)) for n in range(20)]
    assert complaints(many, ()).endswith("and 12 more")


def test_a_group_takes_one_version_and_is_free_again_if_nobody_began():  # P17
    group = GroupVersion()
    assert group.take("1")
    assert not group.take("2")
    assert group.take("1")
    group.given_up()
    assert group.version == "1"
    group.given_up()
    assert (group.version, group.take("2")) == (None, True)
    group.begun()
    assert group.take("2")
    group.given_up()
    assert group.version == "2"


def test_a_version_without_a_name_is_a_version():  # P17
    group = GroupVersion()
    assert group.take("")
    group.begun()
    assert not group.take("2")
    hosts = [known("a", 8, version="2"), known("b", 4, version="")]
    assert choose(hosts, ("",), 0.0) is hosts[1]
    assert choose(hosts, ("2",), 0.0) is hosts[0]
    assert is_played_nowhere(hosts[:1], "", 0.0)
    assert "plays version ''" in complaints(hosts, ("3",))
