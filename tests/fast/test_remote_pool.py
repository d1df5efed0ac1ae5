"""Pools over several hosts in this process: choice, versions, joins and leaves, and what is said when nobody would."""

import asyncio

import pytest
from conftest import RECIPES
from remote_kit import TASK, ObedientOffer, address_of, hosting, pooled, say, session_at

from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.pools import EnvironmentPool
from headrace.actors.remote.registry_file import join_registry, leave_registry
from headrace.platform.config.load import load_recipe
from headrace.platform.config.pools import PoolConfig
from headrace.platform.errors import ConfigError, HostAway


async def test_sessions_spread_over_the_hosts():
    async with hosting(capacity=6) as a, hosting(capacity=6) as b, pooled(a, b) as pool:
        sessions = [pool.session(GroupVersion(), 5.0) for _ in range(12)]
        await asyncio.gather(*(each.reset(TASK, 1) for each in sessions))
        assert (a.sessions, b.sessions) == (6, 6)
        assert {each.address: each.sessions for each in pool.hosts()} == {address_of(a): 6, address_of(b): 6}
        late = pool.session(GroupVersion(), 5.0)
        waiting = asyncio.ensure_future(late.reset(TASK, 1))
        await sessions[0].close()
        await waiting
        await asyncio.gather(*(each.close() for each in [*sessions, late]))
        assert [each.sessions for each in pool.hosts()] == [0, 0]


async def test_a_group_never_mixes_versions():  # P17
    async with hosting(ObedientOffer("1")) as one, hosting(ObedientOffer("2")) as two, pooled(one, two) as pool:
        for _ in range(5):
            group = GroupVersion()
            sessions = [pool.session(group, 5.0) for _ in range(4)]
            await asyncio.gather(*(each.reset(TASK, 1) for each in sessions))
            assert {each.version for each in sessions} == {group.version}
            await asyncio.gather(*(each.close() for each in sessions))
        played = [pool.session(GroupVersion(), 5.0) for _ in range(6)]
        await asyncio.gather(*(each.reset(TASK, 1) for each in played))
        assert {each.version for each in played} == {"1", "2"}  # other groups may play another one
        await asyncio.gather(*(each.close() for each in played))


async def test_a_group_whose_version_is_gone_is_told_at_once():  # P17
    loop = asyncio.get_running_loop()
    async with hosting(ObedientOffer("2")) as two, pooled(two) as pool:
        group = GroupVersion(version="1", has_begun=True)
        session = pool.session(group, 30.0)
        began = loop.time()
        with pytest.raises(HostAway, match=r"played in version 1, and no host has it.*plays version 2"):
            await session.reset(TASK, 1)
        assert loop.time() - began < 5.0


async def test_only_the_versions_of_the_recipe_are_played():
    async with hosting(ObedientOffer("1")) as one, hosting(ObedientOffer("2")) as two:
        async with session_at(one, two, versions=["2"]) as session:
            await session.reset(TASK, 1)
            assert session.version == "2"
        async with session_at(one, versions=["2"], wait_s=0.5) as session:
            with pytest.raises(HostAway, match="plays version 1"):
                await session.reset(TASK, 1)
        assert one.sessions == 0


async def test_a_host_that_drains_before_the_reset_is_left_for_another():
    async with hosting() as old, hosting() as new, pooled(old, new) as pool:
        old.begin_drain()
        for _ in range(3):
            session = pool.session(GroupVersion(), 5.0)
            await session.reset(TASK, 1)
            assert session.provenance.pool == address_of(new)
            await session.close()
        assert {each.address: each.state for each in pool.hosts()}[address_of(old)] in ("draining", "unknown")


async def test_a_host_that_dies_in_mid_episode_says_so_at_once():
    async with hosting() as host, hosting() as other, pooled(host) as pool:
        session = pool.session(GroupVersion(), 5.0)
        await session.reset(TASK, 1)
        for connection in list(host._server.connections):
            connection.transport.abort()
        with pytest.raises(HostAway, match="connection is lost"):
            await asyncio.wait_for(session.step(say("a"), "k"), 2.0)
        await session.close()
        assert pool.hosts()[0].state == "away"
        assert other.played == 0


async def test_a_dead_host_costs_no_waiting_while_another_lives():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    dead = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with hosting() as host, pooled(dead, address_of(host)) as pool:
        for _ in range(5):
            session = pool.session(GroupVersion(), 5.0)
            await asyncio.wait_for(session.reset(TASK, 1), 2.0)
            await session.close()
        assert {each.address: each.state for each in pool.hosts()}[dead] in ("away", "unknown")
    async with session_at(dead, wait_s=0.5) as session:
        with pytest.raises(HostAway, match="no host took a session within") as found:
            await session.reset(TASK, 1)
        assert dead in str(found.value)


async def test_another_environment_is_not_played():
    async with hosting() as host, session_at(host, environment="lookup", wait_s=0.5) as session:
        with pytest.raises(HostAway, match=r"plays obedient \(kit\.py:Obedient\), not lookup"):
            await session.reset(TASK, 1)
    async with hosting() as host, session_at(host, environment="/somewhere/else/kit.py:Obedient") as session:
        await session.reset(TASK, 1)


async def test_hosts_join_and_leave_by_the_registry(tmp_path):
    registry = tmp_path / "hosts.json"
    async with hosting() as a, hosting() as b, pooled(source=str(registry)) as pool:
        empty = pool.session(GroupVersion(), 0.3)
        with pytest.raises(HostAway, match=r"hosts\.json: there are none"):
            await empty.reset(TASK, 1)
        waiting = asyncio.ensure_future(pool.session(GroupVersion(), 10.0).reset(TASK, 1))
        join_registry(registry, address_of(a))
        await asyncio.wait_for(waiting, 3.0)  # within seconds
        assert [each.address for each in pool.hosts()] == [address_of(a)]
        leave_registry(registry, address_of(a))
        join_registry(registry, address_of(b))

        async def address():
            session = pool.session(GroupVersion(), 5.0)
            await session.reset(TASK, 1)
            await session.close()
            return session.provenance.pool

        async with asyncio.timeout(5.0):
            while await address() != address_of(b):  # noqa: ASYNC110 - the file is looked at every now and then
                await asyncio.sleep(0.1)
        registry.write_text("{")  # what was known last still holds
        await asyncio.sleep(0.6)
        assert await address() == address_of(b)


@pytest.mark.parametrize(
    "address",
    ["ws://user:hunter2@host:1", "wss://hunter2@host", "ws://host:1/?token=hunter2", "http://user:hunter2@host"],
)
def test_no_secret_is_part_of_an_address(address, tmp_path):
    for form in (address, [address], {"hosts": [address]}):
        with pytest.raises(ValueError, match="give what hosts ask for as `token`") as found:
            PoolConfig.model_validate(form)
        assert all("hunter2" not in each["msg"] for each in found.value.errors())
    with pytest.raises(ConfigError) as refused:
        load_recipe("lookup", [f"environment.pool={address}"], RECIPES)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("address", ["ws://", "ws://:80", "ws://h:99999", "ws://[::1", "h:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="a host is an address such as"):
        PoolConfig.model_validate([address])


async def test_a_registry_with_a_secret_in_an_address(tmp_path):
    registry = tmp_path / "hosts.json"
    async with hosting() as host, pooled(source=str(registry)) as pool:
        join_registry(registry, f"ws://user:hunter2@127.0.0.1:{host.port}")
        session = pool.session(GroupVersion(), 0.5)
        with pytest.raises(HostAway, match=r"1 of its addresses cannot be used.*`token`") as found:
            await session.reset(TASK, 1)
        assert "hunter2" not in str(found.value)
        join_registry(registry, address_of(host))
        again = pool.session(GroupVersion(), 5.0)
        await again.reset(TASK, 1)
        await again.close()


def test_wrong_args_of_an_openenv_pool_are_said_at_once():
    config = PoolConfig(hosts=("ws://127.0.0.1:1",), protocol="openenv")
    with pytest.raises(ConfigError, match=r"environments\.openenv\.args: acton_field"):
        EnvironmentPool(config, "openenv", "", {"acton_field": "message"})
