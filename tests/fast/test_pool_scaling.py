"""How a running pool is asked for more or fewer replicas, and how replicas of one version are told to roll (P22)."""

import asyncio
import contextlib
import threading

import pytest
from command_line import call_main

from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.pool_control import PoolControl, PoolReplica, PoolState
from headrace.deploy.pool_rolling import PoolRolling
from headrace.deploy.pool_scaling import PoolScaling
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import DeadlineExceeded, NotFound, PartDied, RunFailed
from headrace.platform.observability.parts import Part
from headrace.platform.store.events import RunEvent
from headrace.platform.store.run_root import RunRoot
from headrace.serving.service import ReplicaStats

WAIT_S = 10.0


class Replica:
    """A part that answers with what a test says, and remembers what it was told."""

    def __init__(self, name, *versions, capacity=1, newest=-1, sessions=0, is_draining=False):
        self.name = name
        self.told = []
        self.dead = False
        self.facts = {
            "versions": versions,
            "capacity": capacity,
            "newest": newest,
            "sessions": sessions,
            "is_draining": is_draining,
        }
        self.stats = _Remote(self._stats)
        self.roll = _Remote(self._roll)

    async def ask_now(self, what, call):
        if self.dead:
            raise PartDied(f"{self.name} is dead")
        return await call(self)

    async def _stats(self):
        counters = dict.fromkeys(("sampled_tokens", "prefilled_tokens", "reused_tokens", "running", "load_failures"), 0)
        return ReplicaStats(replica=self.name, **counters, **self.facts)

    async def _roll(self, version, hold, deadline_s):
        self.told.append((version, hold))


class _Remote:
    def __init__(self, method):
        self.remote = method


class Parts:
    """The replicas of a run; one that joins holds what it should."""

    def __init__(self, *replicas, holds_one=False):
        self.replicas = list(replicas)
        self.holds_one = holds_one
        self.held = set()
        self.refusal = None
        self.left = []

    @property
    def everyone(self):
        return self.replicas

    async def add_replica(self):
        if self.refusal is not None:
            raise self.refusal
        self.replicas.append(Replica(f"replica-{len(self.replicas)}", 0, capacity=9))
        return self.replicas[-1].name

    async def remove_replica(self, name, deadline_s, see):
        self.left.append(name)
        self.replicas = [replica for replica in self.replicas if replica.name != name]


def config(*changes):
    return load_recipe("lookup", list(changes), recipes_dir())


@contextlib.asynccontextmanager
async def scaled(root, parts, *changes):
    told = []
    scaling = PoolScaling(
        parts,
        config(*changes),
        PoolControl(str(root)),
        lambda kind, **detail: told.append((kind, detail)),
        lambda part, stats: None,
    )
    task = asyncio.create_task(scaling.run())
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def asked(root, replicas, deadline_s=WAIT_S, is_running=lambda: True):
    control = PoolControl(str(root))
    while True:
        with contextlib.suppress(NotFound):
            await asyncio.to_thread(control.state)
            break
        await asyncio.sleep(0.01)
    return await asyncio.to_thread(lambda: control.wait(control.ask(replicas), deadline_s, is_running))


# --- scaling ----------------------------------------------------------------------------------------------------------


async def test_replicas_join_and_leave_as_asked(tmp_path):
    parts = Parts(Replica("replica-0", 0, capacity=9))
    async with scaled(tmp_path, parts) as told:
        state = await asked(tmp_path, 3)
        assert (state.was, [each.name for each in state.replicas]) == (1, ["replica-0", "replica-1", "replica-2"])
        state = await asked(tmp_path, 1)
        assert (state.was, len(state.replicas)) == (3, 1)
        state = await asked(tmp_path, 1)
        assert (state.was, len(state.replicas)) == (1, 1)
    assert parts.left == ["replica-2", "replica-1"]
    assert told == [
        (RunEvent.POOL_SCALED, {"replicas": 3, "was": 1}),
        (RunEvent.POOL_SCALED, {"replicas": 1, "was": 3}),
    ]


async def test_what_cannot_be_done_is_said_by_name(tmp_path):
    parts = Parts(Replica("replica-0", 0, capacity=9))
    parts.refusal = PartDied("the cluster has no room")
    async with scaled(tmp_path, parts) as told:
        with pytest.raises(RunFailed, match="the cluster has no room"):
            await asked(tmp_path, 2)
        parts.refusal = None
        assert (await asked(tmp_path, 2)).was == 1, "the next request is another one"
        parts.replicas[1].dead = True
        with pytest.raises(RunFailed, match="does not answer"):
            await asked(tmp_path, 1)
    assert len(told) == 1


async def test_a_pool_of_one_version_does_not_shrink_to_one_that_may_not_drain(tmp_path):  # P22
    parts = Parts(Replica("replica-0", 0), Replica("replica-1", 0), holds_one=True)
    async with scaled(tmp_path, parts, "serving.drain=forbidden"):
        with pytest.raises(RunFailed, match=r"serving\.drain=allowed"):
            await asked(tmp_path, 1)
    assert len(parts.replicas) == 2
    async with scaled(tmp_path, parts, "serving.drain=allowed"):
        assert len((await asked(tmp_path, 1)).replicas) == 1


async def test_a_request_of_an_earlier_life_of_the_run_is_over(tmp_path):
    control = PoolControl(str(tmp_path))
    control.ask(5)
    control.tell(PoolState(was=7, handled="another"))
    parts = Parts(Replica("replica-0", 0, capacity=9))
    async with scaled(tmp_path, parts):
        assert (await asked(tmp_path, 1)).was == 1
    assert len(parts.replicas) == 1


async def test_who_asks_while_a_run_is_resumed_is_heard(tmp_path):
    control = PoolControl(str(tmp_path))
    control.tell(PoolState(handled="of an earlier life"))
    request = control.ask(2)
    parts = Parts(Replica("replica-0", 0, capacity=9))
    async with scaled(tmp_path, parts):
        state = await asyncio.to_thread(control.wait, request, WAIT_S, lambda: True)
    assert (state.was, len(parts.replicas)) == (1, 2)


async def test_a_request_whose_place_another_has_taken_is_over(tmp_path):
    control = PoolControl(str(tmp_path))
    control.tell(PoolState())
    first = control.ask(2)
    second = control.ask(3)
    control.tell(PoolState(handled=second.id))
    with pytest.raises(RunFailed, match="another request, for 3 replicas"):
        await asyncio.to_thread(control.wait, first, WAIT_S, lambda: True)
    assert control.wait(second, WAIT_S, lambda: True).handled == second.id


async def test_files_that_cannot_be_read_end_no_run(tmp_path, caplog):
    parts = Parts(Replica("replica-0", 0, capacity=9))
    parts.refusal = OSError("no space left")
    async with scaled(tmp_path, parts):
        with pytest.raises(RunFailed, match="no space left"):
            await asked(tmp_path, 2)
        parts.refusal = None
        (tmp_path / "control" / "pool.json").write_text("scale it to 2, please")
        await until(lambda: "hears no requests" in caplog.text)
        assert (await asked(tmp_path, 2)).was == 1


async def test_nobody_waits_for_a_run_that_is_over(tmp_path):
    control = PoolControl(str(tmp_path))
    control.tell(PoolState())
    with pytest.raises(RunFailed, match="the run ended"):
        await asked(tmp_path, 2, is_running=lambda: False)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
        await asked(tmp_path, 2, deadline_s=0.3)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path):
    """A run whose driver says that it lives."""
    root = RunRoot.create(str(tmp_path), "lookup-abc", "learner:\n  steps: 3\n")
    part = Part(root.url, "driver")
    part.start()
    yield root
    part.close()


def test_the_pool_of_a_run_is_shown(running, tmp_path, monkeypatch, capsys):
    assert call_main(monkeypatch, "pool", "show", "lookup", "--runs-dir", str(tmp_path)) == 2
    assert "has said nothing of its pool" in capsys.readouterr().err
    replicas = (
        PoolReplica(name="replica-0", versions=(4, 5), sessions=7, running=3, held=(4,)),
        PoolReplica(name="replica-1", is_draining=True),
    )
    PoolControl(running.url).tell(PoolState(replicas=replicas))
    assert call_main(monkeypatch, "pool", "show", "lookup", "--runs-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "lookup-abc: 2 replicas",
        "  replica-0  versions 4, 5; 7 sessions, 3 requests, held to 4",
        "  replica-1  no version yet; 0 sessions, 0 requests, draining",
    ]
    assert call_main(monkeypatch, "pool", "show", "lookup", "--runs-dir", str(tmp_path), "--json") == 0
    assert '"versions": [4, 5], "sessions": 7' in capsys.readouterr().out


def test_the_command_waits_for_the_driver(running, tmp_path, monkeypatch, capsys):
    control = PoolControl(running.url)
    control.tell(PoolState(replicas=(PoolReplica(name="replica-0"),)))
    stop = threading.Event()

    def drive():
        while not stop.wait(0.02):
            if (request := control.request()) is not None:
                replicas = tuple(PoolReplica(name=f"replica-{n}") for n in range(request.replicas))
                control.tell(PoolState(replicas=replicas, handled=request.id, was=1))

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        assert call_main(monkeypatch, "pool", "scale", "lookup", "3", "--runs-dir", str(tmp_path), "--json") == 0
    finally:
        stop.set()
        driver.join()
    assert '"replicas": 3, "was": 1' in capsys.readouterr().out


# --- rolling (P22) ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def rolling(parts, *changes):
    task = asyncio.create_task(PoolRolling(parts, config(*changes)).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the loop tells replicas, and nobody else
            await asyncio.sleep(0.01)


async def test_one_replica_is_told_to_roll():  # P22
    busy, idle = Replica("replica-0", 3, newest=4, sessions=9), Replica("replica-1", 3, newest=5)
    async with rolling(Parts(busy, idle, holds_one=True)):
        await until(lambda: idle.told)
        idle.facts["is_draining"] = True
        told = list(idle.told)
        assert set(told) == {(5, False)} and busy.told == []
        idle.facts |= {"is_draining": False, "versions": (5,)}
        await until(lambda: busy.told)
    assert set(busy.told) == {(5, False)}


async def test_a_dead_replica_wedges_nothing():
    dead, alive = Replica("replica-0", 3, newest=5), Replica("replica-1", 3, newest=5)
    dead.dead = True
    parts = Parts(dead, alive, holds_one=True)
    async with rolling(parts, "serving.drain=allowed"):
        await until(lambda: alive.told)
    assert alive.told[0] == (5, False)


async def test_an_evaluation_is_given_one_replica():
    first, second = Replica("replica-0", 5, newest=5), Replica("replica-1", 4, newest=5)
    parts = Parts(first, second, holds_one=True)
    parts.held.add(5)
    async with rolling(parts, "rollout.update_mode=turn"):
        await until(lambda: first.told)
    assert first.told[0] == (5, True) and second.told == []
