"""The seven codes: each is assigned once, at the boundary where it happens, with its owner, and kept after that.

The table in docs/errors.md says the same as this file.
"""

import asyncio
import concurrent.futures
import itertools
import multiprocessing
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from episode_kit import DONE, World, ends, goes_on, make_plan, never, play, raises, says
from worker_kit import SIZE, Bench

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.off_loop import OffLoop
from headrace.actors.scoring.process import ScorerProcess
from headrace.platform import errors
from headrace.platform.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EnvironmentFault,
    HeadraceError,
    HostAway,
    InfrastructureFault,
    SandboxDied,
    VersionUnavailable,
)
from headrace.platform.records import (
    Budgets,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    Status,
    StepResult,
    StopReason,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.status import FaultOwner
from headrace.platform.testing.fakes.engine import ScriptedEngine

NONE, ENVIRONMENT, INFRASTRUCTURE, SAFETY = (
    FaultOwner.NONE,
    FaultOwner.ENVIRONMENT,
    FaultOwner.INFRASTRUCTURE,
    FaultOwner.SAFETY,
)
TRANSIENT, BUG, SPENT = Status.ENV_TRANSIENT, Status.ENV_BUG, Status.BUDGET_EXHAUSTED


class Grader:
    """Grades everything with 1, and counts."""

    version = "grader/1"

    def __init__(self):
        self.asked = 0

    async def score(self, task, episode):
        self.asked += 1
        return (RewardComponent(RewardKind.OUTCOME, 1.0),)


class HangingEngine(ScriptedEngine):
    """Answers nothing."""

    async def generate(self, request):
        return await never()


def failing(error):
    return {"engine": ScriptedEngine(raises(error))}


def at(where, error):
    return {"world": World(**{where: raises(error)})}


def answering(*answers, **fields):
    left = iter(answers)
    return {"world": World(lambda _: next(left)), **fields}


def blocked(**fields):
    return StepResult(status=Status.SAFETY_BLOCK, **fields)


SHORT = make_plan(budgets=Budgets(max_seconds=0.05))
ONE_TURN = make_plan(budgets=Budgets(max_turns=1))
FEW_TOKENS = make_plan(budgets=Budgets(max_tokens=8))
MISTAKEN = Status.MODEL_INVALID_ACTION


def boundaries():
    """Boundary and what happens there: (world, engine and plan; code; owner; whether it is graded)."""
    return {
        "nothing happens": (answering(StepResult(terminated=True)), Status.OK, NONE, True),
        **{
            f"{where}: {name}": (at(where, error), code, owner, False)
            for where in ("reset", "step")
            for name, error, code, owner in (
                ("its code raises", KeyError("board"), BUG, ENVIRONMENT),
                ("it says that it is broken", EnvironmentFault("no board", transient=False), BUG, ENVIRONMENT),
                ("it says that it may pass", EnvironmentFault("busy"), TRANSIENT, ENVIRONMENT),
                ("its own socket times out", TimeoutError("no answer"), TRANSIENT, ENVIRONMENT),
                ("its own deadline", DeadlineExceeded("no answer"), TRANSIENT, ENVIRONMENT),
                ("its sandbox dies", SandboxDied("killed"), TRANSIENT, INFRASTRUCTURE),  # case E13
                ("its host is away", HostAway("draining"), TRANSIENT, INFRASTRUCTURE),
                ("what it stands on fails", InfrastructureFault("no disk"), TRANSIENT, INFRASTRUCTURE),
                ("what it stands on fails for good", InfrastructureFault("no disk", False), TRANSIENT, INFRASTRUCTURE),
                ("its own model is away", EngineDead("the judge"), TRANSIENT, INFRASTRUCTURE),
            )
        },
        "reset: hangs": (
            {"world": World(reset=never), "plan": make_plan(reset_deadline_s=0.05)},
            TRANSIENT,
            ENVIRONMENT,
            0,
        ),
        "step: hangs": (
            {"world": World(never), "plan": make_plan(step_deadline_s=0.05)},
            TRANSIENT,
            ENVIRONMENT,
            False,
        ),
        "step: returns nothing": (answering(None), BUG, ENVIRONMENT, False),
        "step: says nothing": (answering(StepResult()), BUG, ENVIRONMENT, False),
        "step: ends twice": (answering(StepResult(terminated=True, truncated=True)), BUG, ENVIRONMENT, False),
        "step: answers a fault": (answering(goes_on(status=TRANSIENT)), TRANSIENT, ENVIRONMENT, False),
        "step: answers a bug": (answering(goes_on(status=BUG)), BUG, ENVIRONMENT, False),
        "step: a mistake that ends it": (answering(StepResult(terminated=True, status=MISTAKEN)), MISTAKEN, NONE, True),
        "step: a plan that ends it": (
            answering(StepResult(terminated=True, status=Status.MODEL_BAD_PLAN)),
            Status.MODEL_BAD_PLAN,
            NONE,
            True,
        ),
        "step: a mistake, then well": (answering(goes_on(status=MISTAKEN), ends(1.0)), Status.OK, NONE, True),
        "safety: ends": (answering(blocked(terminated=True)), Status.SAFETY_BLOCK, SAFETY, False),
        "safety: ends as by a limit": (answering(blocked(truncated=True)), Status.SAFETY_BLOCK, SAFETY, False),
        "safety: goes on": (answering(goes_on(status=Status.SAFETY_BLOCK), ends(1.0)), Status.OK, NONE, True),
        "budget: the world's": (answering(StepResult(truncated=True)), SPENT, NONE, True),
        "budget: by its status": (answering(StepResult(terminated=True, status=SPENT)), SPENT, NONE, True),
        "budget: turns": (answering(goes_on(), plan=ONE_TURN), SPENT, NONE, True),
        "budget: tokens": (answering(goes_on("more " * 9), plan=FEW_TOKENS), SPENT, NONE, True),
        "budget: seconds": ({"world": World(never), "plan": SHORT}, SPENT, NONE, True),
        "budget: seconds, before it acted": (
            {"world": World(reset=never), "plan": SHORT},
            TRANSIENT,
            ENVIRONMENT,
            False,
        ),
        "generation: the engine is dead": (failing(EngineDead("gone")), TRANSIENT, INFRASTRUCTURE, False),  # case E15
        "generation: no replica has it": (failing(VersionUnavailable("v3")), TRANSIENT, INFRASTRUCTURE, False),
        "generation: refused": (failing(EngineError("too long")), TRANSIENT, INFRASTRUCTURE, False),
        "generation: late": (failing(DeadlineExceeded("60 s")), TRANSIENT, INFRASTRUCTURE, False),
        "generation: anything": (failing(ZeroDivisionError()), TRANSIENT, INFRASTRUCTURE, False),
        "generation: hangs": (
            {"engine": HangingEngine(lambda _: DONE), "plan": make_plan(request_deadline_s=0.05)},
            TRANSIENT,
            INFRASTRUCTURE,
            False,
        ),
    }


@pytest.mark.parametrize("boundary", boundaries())
async def test_who_owns_it(boundary):  # P27
    parts, code, owner, graded = boundaries()[boundary]
    world, engine, grader = parts.get("world") or World(), parts.get("engine") or says(DONE), Grader()
    played = await play(world, engine, plan=parts.get("plan"), scorer=grader)
    episode = played.episode
    assert (episode.status, episode.fault_owner) == (code, owner)
    assert (grader.asked, played.score is not None) == (int(graded), bool(graded)), "failure is never a reward"
    assert bool(episode.fault) == (owner is not NONE), "a fault has a cause, and nothing else has"
    assert episode.truncated == code.is_truncated
    assert (episode.stop_reason is StopReason.FAULT) == code.is_error
    stored = episode_codec.decode(episode_codec.encode(episode))
    assert (stored.status, stored.fault_owner, stored.fault) == (code, owner, episode.fault)
    assert world.closed == 1


def test_every_code_and_owner_is_tried():
    assert {code for _, code, _, _ in boundaries().values()} == set(Status)
    model = {FaultOwner.MODEL}  # a mistake of the model is an observation; its episode is graded
    assert {owner for _, _, owner, _ in boundaries().values()} == set(FaultOwner) - model


def test_the_table_for_people_has_every_code():
    table = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
    assert all(f"`{code}`" in table for code in Status)
    assert all(f"`{owner}`" in table for owner in FaultOwner)


async def test_a_timeout_of_the_worlds_own_names_its_place():
    fault = (await play(World(raises(TimeoutError("no answer"))), says(DONE))).episode.fault
    assert fault.startswith("episode_kit.py:") and fault.endswith("TimeoutError: no answer")


@pytest.mark.parametrize(
    ("reward", "valid"),
    [("raise ValueError('no answer key')", False), ("import time; time.sleep(60)", False), ("return 0.0", True)],
)
async def test_scorer_a_failure_is_no_fault_of_the_episode_and_no_reward(tmp_path, reward, valid):  # case E1
    (tmp_path / "grade.py").write_text(f"def reward(completion, **_):\n    {reward}\n")
    scorer = ScorerProcess(f"{tmp_path / 'grade.py'}:reward", {}, deadline_s=1.0)
    await scorer.start()
    try:
        played = await play(World(lambda _: StepResult(terminated=True)), says(DONE), scorer=scorer)
    finally:
        await scorer.close()
    assert (played.episode.status, played.episode.fault_owner) == (Status.OK, NONE)
    assert [row.valid for row in played.rewards] == [valid]
    assert played.score == (0.0 if valid else None)
    assert bool(played.cause) != valid


def every_error():
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HeadraceError)]
    return sorted(kinds, key=lambda kind: kind.__name__)


def same(error):
    return error


@pytest.mark.parametrize("kind", every_error())
def test_an_error_is_the_same_in_another_process(kind):
    error = kind("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args) == (kind, str(error), error.args)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("kind", [EnvironmentFault, InfrastructureFault, SandboxDied, HostAway])
def test_a_fault_says_in_another_process_whether_it_passes(kind, transient):
    again = pickle.loads(pickle.dumps(kind("what happened", transient=transient)))
    assert (type(again), again.transient, str(again)) == (kind, transient, "what happened")


def test_errors_cross_a_real_process():
    kinds = every_error()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        back = list(pool.map(same, [kind("what happened") for kind in kinds]))
    assert [(type(error), str(error)) for error in back] == [(kind, "what happened") for kind in kinds]


# --- what becomes of the others -------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path, monkeypatch):
    def make(world, **options):
        return Bench(tmp_path, monkeypatch, world, **options)

    return make


async def leased(bench):
    """The one group that is ready, as the learner gets it."""
    stats = await bench.ledger.stats()
    (group,) = await bench.ledger.lease(bench.fence, stats.head, 0, 1)
    return group


@pytest.mark.parametrize("error", [SandboxDied("killed"), HostAway("draining"), EngineDead("gone")], ids=str)
async def test_one_of_a_group_that_fails_for_infrastructure_is_refilled(bench, error):  # case E2
    tries = itertools.count()

    def step(message):
        if next(tries) == 2:
            raise error
        return ends(0.25)

    b = bench(lambda n: World(step))
    await b.publish()
    assert await b.worker.play_round(1) == 1
    stats = await b.ledger.stats()
    assert (stats.dispatched, stats.fates["failed:infrastructure"], stats.groups_ready) == (SIZE + 1, 1, 1)
    group = await leased(b)
    assert len(group.members) == group.size == SIZE
    assert sorted(member.attempt_id.attempt for member in group.members) == [0, 0, 0, 1]
    assert [member.score for member in group.members] == [0.25] * SIZE, "the one that failed is in no baseline"
    await b.check_closed()


async def test_one_of_a_group_that_never_comes_through_is_left_out(bench):  # case E2
    def make(n):
        return World(raises(SandboxDied("killed")) if n in (2, SIZE, SIZE + 1) else lambda _: ends(0.25))

    b = bench(make, limits={"min_group": 2})
    await b.publish()
    await b.worker.play_round(1)
    group = await leased(b)
    assert (group.size, [member.score for member in group.members]) == (SIZE, [0.25] * (SIZE - 1))
    assert (await b.check_closed()).fates["failed:infrastructure"] == 3


async def test_one_of_64_times_out_and_63_are_trained(bench):  # case E5
    b = bench(
        lambda n: World(
            raises(DeadlineExceeded("no answer within 30 s")) if n == 17 or n >= 64 else lambda _: ends(1.0)
        ),
        group_size=64,
        max_episodes=64,
        limits={"min_group": 2},
    )
    await b.publish()
    await b.worker.play_round(1)
    group = await leased(b)
    assert (group.size, len(group.members)) == (64, 63)
    assert (await b.check_closed()).fates["failed:environment"] == 3


async def test_a_reset_that_fails_at_random_is_tried_again_in_a_fresh_world_and_counted(bench):  # case E18
    tries, opening = itertools.count(), Observation((Message(Role.USER, "go"),))

    def reset():
        if next(tries) % 3 == 1:
            raise EnvironmentFault("it did not come up")
        return opening

    b = bench(lambda n: World(reset=reset), limits={"max_attempts": 8})
    await b.publish()
    await b.worker.play_round(1)
    stats = await b.ledger.stats()
    failed = stats.fates["failed:environment"]
    assert failed >= 1 and stats.dispatched == SIZE + failed and stats.groups_ready == 1
    assert [len(world.resets) for world in b.used] == [1] * (SIZE + failed), "no world is reset a second time"
    assert b.worker.stats().statuses == {"OK": SIZE, "ENV_TRANSIENT": failed}
    episodes = list(b.store.iterate())
    assert len({(episode.task.task_id, episode.seed) for episode in episodes}) == 1
    assert len({msgspec.json.encode(e.turns[0].state_hash) for e in episodes if e.status is Status.OK}) == 1
    await b.check_closed()


async def test_32_plain_environments_that_block_do_so_side_by_side():  # case E11
    class Blocking(ReplayedEnvironment):
        name, version = "blocking", "1"

        def tools(self):
            return ()

        def _reset(self, task, seed):
            return Observation((Message(Role.USER, "go"),))

        def _step(self, message):
            time.sleep(0.2)
            return ends(1.0)

    with ThreadPoolExecutor(32) as threads:
        warm = [OffLoop(threads).call(time.sleep, 0.01) for _ in range(32)]  # threads are not made in the second
        await asyncio.gather(*warm)
        began = time.monotonic()
        played = await asyncio.gather(
            *(play(as_async(Blocking(), threads), says(DONE), plan=make_plan(sample=n)) for n in range(32))
        )
        took_s = time.monotonic() - began
    assert [each.score for each in played] == [1.0] * 32
    assert took_s < 1.0, "one after the other they take 6.4 s"
