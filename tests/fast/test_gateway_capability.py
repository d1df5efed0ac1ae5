"""Grants: which one covers a call, what becomes of limited ones, and what a task may grant itself."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.gateway.decisions import budgets, capability
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.decisions.patterns import fits, within
from headrace.actors.gateway.policy import Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, SideEffectTier

READ, WRITE, NETWORK = Capability.READ, Capability.WRITE, Capability.NETWORK
SECRET, IRREVERSIBLE = Capability.SECRET, Capability.IRREVERSIBLE
FETCH = ToolSpec("fetch", capability=NETWORK, reads={"url": "url"})
PATH = {"properties": {"path": {"type": "string", "default": "."}}}
FILE = ToolSpec("read_file", parameters=PATH, reads={"path": "path"})
SHELL = ToolSpec("shell", capability=WRITE, reads={"command": "command"})


def state_of(*grants):
    return EpisodeState("e/0#1", Policy(), {}, frozenset(), grants, began_s=100.0)


def asked_of(spec, **arguments):
    return Asked(ToolCall(spec.name, arguments), spec, "e/0/0/0", here=False)


def rule(spec, *grants, now_s=100.0, **arguments):
    denial = capability.check(asked_of(spec, **arguments), state_of(*grants), now_s)
    return denial and denial.rule


@pytest.mark.parametrize("needed", list(Capability))
def test_what_is_not_granted_is_denied(needed):
    spec = ToolSpec("t", capability=needed)
    others = [Grant(each) for each in Capability if each is not needed]
    denial = capability.check(asked_of(spec), state_of(*others), 100.0)
    assert (denial.rule, denial.told, denial.invalid) == (f"capability:{needed}", f"{needed} is not granted", False)
    assert rule(spec, *others, Grant(needed)) is None


def test_the_first_grant_that_covers_the_call_is_the_one():
    grants = Grant(NETWORK, tools=("other",)), Grant(NETWORK, tools=("fet*",)), Grant(NETWORK)
    asked = asked_of(FETCH, url="https://example.org")
    assert capability.check(asked, state_of(*grants), 100.0) is None
    assert asked.grant is grants[1]


def test_a_tool_that_no_pattern_fits_is_not_granted():
    assert rule(FETCH, Grant(NETWORK, tools=("search", "Fetch", "fetch_all"))) == "capability:network"


def test_a_grant_expires_counted_from_the_first_call():
    grant = Grant(READ, expires_s=10.0)
    assert rule(FILE, grant, now_s=109.9) is None
    assert rule(FILE, grant, now_s=110.0) == "capability:expired"
    assert rule(FILE, grant, Grant(READ), now_s=110.0) is None


def test_uses_are_spent_by_calls_that_happen():
    state = state_of(Grant(READ, uses=2))
    for _ in range(5):
        assert capability.check(asked_of(FILE), state, 100.0) is None
    assert [budgets.check(asked_of(FILE), state, 100.0) is None for _ in range(3)] == [True, True, False]
    assert (state.uses, state.calls) == ({0: 2}, 2)
    assert capability.check(asked_of(FILE), state, 100.0).rule == "capability:uses"


def test_a_grant_that_ended_while_the_call_waited_counts_no_more():
    state = state_of(Grant(READ, expires_s=10.0))
    asked = asked_of(FILE)
    assert capability.check(asked, state, 105.0) is None
    assert budgets.check(asked, state, 115.0).rule == "capability:expired"
    assert state.calls == 0


@pytest.mark.parametrize(
    "spec",
    [
        ToolSpec("send", capability=NETWORK, tier=SideEffectTier.IRREVERSIBLE),
        ToolSpec("send", capability=NETWORK, tier=SideEffectTier.IRREVERSIBLE, reads={"text": "text"}),
    ],
)
def test_what_cannot_be_undone_needs_both_grants_and_spends_both(spec):
    assert rule(spec, Grant(NETWORK)) == "capability:irreversible"
    assert rule(spec, Grant(IRREVERSIBLE)) == "capability:network"
    state = state_of(Grant(IRREVERSIBLE, uses=1), Grant(NETWORK, uses=5))
    assert capability.check(asked_of(spec), state, 100.0) is None
    assert budgets.check(asked_of(spec), state, 100.0) is None
    assert state.uses == {0: 1, 1: 1}
    assert budgets.check(asked_of(spec), state, 100.0).rule == "capability:uses"
    assert state.uses == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("path", "covered"),
    [
        ("src/a.py", True),
        ("src/deep/a.py", True),
        ("src", True),
        ("./src//a.py", True),
        ("/workspace/src/a.py", True),
        ("srcs/a.py", False),
        ("README.md", False),
        ("src/../README.md", False),
        ("src%2f..%2fREADME.md", False),
        ("/src/a.py", False),
        (".", False),
    ],
)
def test_a_grant_for_paths_covers_those_alone(path, covered):
    assert rule(FILE, Grant(READ, paths=("src/*",)), path=path) == (None if covered else "capability:scope")


def test_a_path_that_is_left_out_is_its_default():
    assert rule(FILE, Grant(READ, paths=("src/*",))) == "capability:scope"
    assert rule(FILE, Grant(READ, paths=("*",))) is None


@pytest.mark.parametrize(
    ("url", "covered"),
    [
        ("https://example.org/a", True),
        ("https://EXAMPLE.org./a", True),
        ("https://example.org.evil.net/", False),
        ("https://example.org@evil.net/", False),
        ("https://a.example.org/", False),
        ("not a url", False),
        ("http://127.0.0.1/", False),
    ],
)
def test_a_grant_for_domains_covers_those_alone(url, covered):
    assert rule(FETCH, Grant(NETWORK, domains=("example.org",)), url=url) == (None if covered else "capability:scope")


def test_every_path_and_url_of_a_call_has_to_be_covered():
    both = ToolSpec("move", reads={"source": "path", "target": "path"})
    grant = Grant(READ, paths=("src/*",))
    assert rule(both, grant, source="src/a", target="src/b") is None
    assert rule(both, grant, source="src/a", target="b") == "capability:scope"
    assert rule(both, grant, source=["src/a", {"x": "b"}], target="src/b") == "capability:scope"


def test_a_narrow_grant_covers_no_call_in_which_anything_could_be_named():
    assert rule(SHELL, Grant(WRITE, paths=("src/*",)), command="cat src/a") == "capability:scope"
    assert rule(ToolSpec("count"), Grant(READ, paths=("*",))) == "capability:scope"
    assert rule(ToolSpec("ping", capability=NETWORK), Grant(NETWORK, domains=("*",))) == "capability:scope"


# --- what a task may grant itself -------------------------------------------------------------------------------------

CEILING = Policy(
    grants=(Grant(READ), Grant(WRITE, tools=("edit_*",))),
    ceiling=(Grant(NETWORK, domains=("*.example.org",), uses=5), Grant(SECRET, expires_s=60.0)),
)


def test_a_task_that_says_nothing_has_the_policys_grants():
    assert capability.effective_grants(CEILING, ()) == CEILING.grants


@pytest.mark.parametrize(
    "grants",
    [
        (Grant(READ),),
        (Grant(READ, paths=("src/*",), uses=1),),
        (Grant(WRITE, tools=("edit_file",)),),
        (Grant(WRITE, tools=("edit_f*",)),),
        (Grant(NETWORK, domains=("a.example.org",), uses=2), Grant(NETWORK, domains=("*.example.org",), uses=3)),
        (Grant(SECRET, expires_s=60.0), Grant(SECRET, expires_s=5.0, tools=("x",))),
    ],
)
def test_a_task_may_grant_what_is_within(grants):
    assert capability.effective_grants(CEILING, grants) == grants


@pytest.mark.parametrize(
    "grants",
    [
        (Grant(IRREVERSIBLE),),
        (Grant(WRITE),),
        (Grant(WRITE, tools=("*",)),),
        (Grant(WRITE, tools=("edit_file", "shell")),),
        (Grant(NETWORK, uses=5),),
        (Grant(NETWORK, domains=("*.example.org",)),),
        (Grant(NETWORK, domains=("*.org",), uses=1),),
        (Grant(NETWORK, domains=("*.example.org",), uses=6),),
        (Grant(NETWORK, domains=("*.example.org",), uses=3),) * 2,
        (Grant(SECRET),),
        (Grant(SECRET, expires_s=61.0),),
    ],
)
def test_a_task_may_not_grant_itself_more(grants):
    with pytest.raises(ConfigError, match=r"more than permissions\.tasks_may_grant lets it"):
        capability.effective_grants(CEILING, grants)


def test_without_a_ceiling_a_task_may_only_have_less():
    policy = Policy(grants=(Grant(READ),))
    assert capability.effective_grants(policy, (Grant(READ, uses=1),)) == (Grant(READ, uses=1),)
    with pytest.raises(ConfigError, match="grants itself network"):
        capability.effective_grants(policy, (Grant(NETWORK),))


PATTERN = st.text("ab*?[]", min_size=1, max_size=5)


@given(PATTERN, PATTERN, st.text("ab[]", max_size=6))
def test_what_fits_the_narrow_fits_the_wide(narrow, wide, name):
    if within((narrow,), (wide,)) and fits(name, (narrow,)):
        assert fnmatch.fnmatchcase(name, wide)
