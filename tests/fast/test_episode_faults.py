"""What breaks around an episode: whose fault it is, what is given back, and that no failure becomes a reward."""

import asyncio
import logging
import threading

import pytest
from episode_kit import DONE, World, char_call, ends, generation, goes_on, make_plan, never, play, raises, says, turn_of

from headrace.actors.episode import play_episode
from headrace.actors.outcomes import EnvironmentCounts
from headrace.platform.errors import (
    DeadlineExceeded,
    EngineDead,
    EnvironmentFault,
    FidelityError,
    SandboxDied,
    VersionUnavailable,
)
from headrace.platform.fidelity import check_episode
from headrace.platform.records import (
    Budgets,
    FinishReason,
    Generation,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    Status,
    StepResult,
    StopReason,
    VersionRef,
    VersionSpan,
    f32,
    i32,
)
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.environment import ScriptedEnvironment
from headrace.platform.testing.fakes.renderer import CharRenderer


class Grader:
    """Counts how often it is asked."""

    version = "grader/1"

    def __init__(self, answer=None):
        self.asked = 0
        self.answer = (RewardComponent(RewardKind.OUTCOME, 1.0),) if answer is None else answer

    async def score(self, task, episode):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


INVALID = (RewardComponent(RewardKind.OUTCOME, valid=False, evidence="scorer timed out after 1 s"),)


# case E1
async def test_a_grader_that_raises_one_that_times_out_and_a_true_zero_are_three_outcomes():
    zero = (RewardComponent(RewardKind.OUTCOME, 0.0),)
    played = [
        await play(World(lambda _: StepResult(terminated=True)), says(DONE), scorer=Grader(answer))
        for answer in (ZeroDivisionError("in the grader"), INVALID, zero)
    ]
    assert [each.score for each in played] == [None, None, 0.0]
    assert [each.rewards[0].valid for each in played] == [False, False, True]
    assert [each.rewards[0].evidence for each in played] == [
        "ZeroDivisionError: in the grader",
        "scorer timed out after 1 s",
        "",
    ]
    assert all(each.episode.status is Status.OK for each in played)


async def test_one_invalid_component_makes_the_whole_reward_invalid():
    scorer = Grader((RewardComponent(RewardKind.OUTCOME, 1.0), *INVALID))
    assert (await play(World(), says(DONE), scorer=scorer)).score is None


# case E15
@pytest.mark.parametrize(
    "error",
    [
        EngineDead("gone"),
        VersionUnavailable("v0"),
        DeadlineExceeded("slow"),
        ConnectionResetError("reset"),
        ValueError(),
    ],
)
async def test_an_engine_that_fails_for_good_is_never_graded(error):
    scorer, world = Grader(), World()
    played = await play(world, ScriptedEngine(raises(error)), scorer=scorer)
    episode = played.episode
    assert (episode.status, episode.fault_owner) == (Status.ENV_TRANSIENT, "infrastructure")
    assert (episode.stop_reason, played.score, played.rewards) == (StopReason.FAULT, None, ())
    assert episode.fault.startswith(type(error).__name__)
    assert (scorer.asked, world.messages, world.closed) == (0, [], 1)


async def test_what_was_sampled_before_the_engine_died_is_kept():
    def replies(request):
        if turn_of(request) == 1:
            raise EngineDead("gone")
        return char_call(1)

    played = await play(ScriptedEnvironment(), ScriptedEngine(replies))
    assert [turn.role for turn in played.episode.turns] == ["user", "assistant", "tool"]
    assert played.score is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EnvironmentFault("lost its sandbox"), Status.ENV_TRANSIENT),
        (EnvironmentFault("asserts", transient=False), Status.ENV_BUG),
        (KeyError("chain"), Status.ENV_BUG),
        (TimeoutError("its own socket"), Status.ENV_TRANSIENT),
        (DeadlineExceeded("its own sandbox"), Status.ENV_TRANSIENT),
        (RecursionError(), Status.ENV_BUG),
        (SystemExit(3), Status.ENV_BUG),
        (asyncio.CancelledError("from inside"), Status.ENV_BUG),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), Status.ENV_BUG),
        (RuntimeError("\ud800 is no text"), Status.ENV_BUG),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_world_that_breaks_is_to_blame(error, status, where):
    world = World(**{where: raises(error)})
    scorer, engine = Grader(), says(DONE)
    played = await play(world, engine, scorer=scorer)
    episode = played.episode
    assert (episode.status, episode.fault_owner, episode.stop_reason) == (status, "environment", StopReason.FAULT)
    assert (played.score, played.rewards, scorer.asked) == (None, (), 0)
    assert len(episode.turns) == (0 if where == "reset" else 2)
    assert (world.closed, engine.sessions(0)) == (1, 0)


async def test_a_box_that_is_gone_is_counted_apart():
    """A policy that learns to end its box has its attempts thrown away; the count tells."""
    counts = EnvironmentCounts()
    for error in (SandboxDied("box-3 is gone"), EnvironmentFault("lost"), SandboxDied("box-4 is gone")):
        counts.add(await play(World(step=raises(error)), says(DONE)))
    assert (counts.episodes, counts.scored, counts.sandbox_died) == (3, 0, 2)
    assert (counts + counts).sandbox_died == 4


# case X15
async def test_a_reset_that_hangs_is_ended_by_its_deadline():
    played = await play(World(reset=never), says(DONE), plan=make_plan(reset_deadline_s=0.05))
    assert played.episode.fault == "reset outran its deadline"
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_TRANSIENT, "environment")


async def test_a_generation_that_hangs_is_the_machinerys_fault():
    class Hanging(ScriptedEngine):
        async def generate(self, request):
            return await never()

    world = World()
    played = await play(world, Hanging(lambda _: DONE), plan=make_plan(request_deadline_s=0.05))
    assert played.episode.fault == "generation outran its deadline"
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_TRANSIENT, "infrastructure")
    assert world.closed == 1


@pytest.mark.parametrize("where", ["reset", "generation"])
async def test_a_budget_that_ends_before_the_policy_acted_says_nothing_about_it(where):
    class Hanging(ScriptedEngine):
        async def generate(self, request):
            return await never()

    world = World(reset=never) if where == "reset" else World()
    scorer = Grader()
    plan = make_plan(budgets=Budgets(max_seconds=0.05))
    played = await play(world, Hanging(lambda _: DONE), plan=plan, scorer=scorer)
    assert (played.score, scorer.asked) == (None, 0)
    assert played.episode.status is Status.ENV_TRANSIENT
    assert played.episode.fault_owner == ("environment" if where == "reset" else "infrastructure")


async def test_every_wait_has_its_own_deadline():
    """A long deadline that follows a short one holds, and the other way round."""
    seen = []

    async def slow_reset():
        await asyncio.sleep(0.4)
        return Observation((Message(Role.USER, "go"),))

    async def step(message):
        seen.append(message.content)
        return await never() if len(seen) == 3 else goes_on()

    plan = make_plan(reset_deadline_s=9.0, request_deadline_s=0.3, step_deadline_s=0.5, budgets=Budgets(9, 512, 9.0))
    played = await play(World(step, slow_reset), says(DONE), plan=plan)
    assert (played.episode.fault, len(seen)) == ("step outran its deadline", 3)
    assert played.episode.duration_s >= 0.9


# nasty generations
@pytest.mark.parametrize("finish", list(FinishReason))
async def test_a_generation_without_a_token_is_the_engines_failure(finish):
    world = World()
    played = await play(world, ScriptedEngine(lambda _: generation([], finish)))
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_TRANSIENT, "infrastructure")
    assert "no token" in played.episode.fault
    assert (world.messages, played.score) == ([], None)


async def test_logprobs_of_another_length_are_kept_for_the_gate_to_refuse():
    """case T16: never padded."""
    wrong = Generation(i32(DONE), f32([-0.5]), FinishReason.STOP, generation(DONE).version_spans)
    played = await play_episode(make_plan(), World(), CharRenderer(), ScriptedEngine(lambda _: wrong))
    assert len(played.episode.turns[1].behaviour_logprobs) == 1
    with pytest.raises(FidelityError, match=r"^lengths: turn 1"):
        check_episode(played.episode)


async def test_tokens_of_another_version_do_not_pass_for_the_planned_one():
    played = await play_episode(
        make_plan(version=VersionRef("scripted", 3)),
        World(),
        CharRenderer(),
        ScriptedEngine(lambda _: generation(DONE, version=1), versions=(3,)),
    )
    assert played.episode.version.number == 3
    assert played.episode.oldest_version == 1
    with pytest.raises(FidelityError, match=r"^versions: turn 1"):
        check_episode(played.episode)


async def test_the_lineage_is_the_engines():
    """A plan knows a number; the manifest behind the engine knows the fence."""
    whole = generation(DONE)
    ref = VersionRef("scripted", 0, lineage=4)
    spans = (VersionSpan(ref, 0, len(DONE)),)
    engine = ScriptedEngine(lambda _: Generation(whole.token_ids, whole.logprobs, whole.finish_reason, spans))
    assert (await play(World(), engine)).episode.version == ref


@pytest.mark.parametrize("answer", [None, {"messages": ()}, (Message(Role.TOOL, "x"),)])
async def test_an_answer_that_is_no_result_is_a_bug_of_the_world(answer):
    played = await play(World(lambda _: answer), says(DONE))
    assert (played.episode.status, played.score) == (Status.ENV_BUG, None)
    assert played.episode.turns[-1].token_ids.tolist() == DONE, "what was sampled is kept"


async def test_a_reward_that_is_no_reward_is_a_bug_of_the_world():
    played = await play(World(lambda _: StepResult(rewards=(1.0,), terminated=True)), says(DONE))
    assert (played.episode.status, played.score) == (Status.ENV_BUG, None)
    assert played.episode.turns[-1].token_ids.tolist() == DONE


# giving back
async def test_a_close_that_raises_spoils_nothing(caplog):
    class Stuck(World):
        async def close(self):
            await super().close()
            raise OSError("device is busy")

    engine, world = says(DONE), Stuck()
    with caplog.at_level(logging.WARNING):
        played = await play(world, engine)
    assert played.score == 1.0
    assert "its environment is not closed: OSError: device is busy" in caplog.text


@pytest.mark.parametrize("how", ["hangs", "raises"])
async def test_a_release_that_fails_does_not_keep_the_world_open(how, caplog):
    class Engine(ScriptedEngine):
        async def release(self, session):
            if how == "hangs":
                await never()
            raise ConnectionError("door is shut")

    world = World()
    with caplog.at_level(logging.WARNING):
        played = await play(world, Engine(lambda _: DONE), plan=make_plan(step_deadline_s=0.05))
    assert (played.score, world.closed) == (1.0, 1)
    assert "its session is not closed" in caplog.text


async def test_a_close_that_hangs_has_a_deadline():
    class Hanging(World):
        async def close(self):
            await never()

    assert (await play(Hanging(), says(DONE), plan=make_plan(step_deadline_s=0.05))).score == 1.0


# case X4
@pytest.mark.parametrize("where", ["reset", "generate", "step", "release", "close"])
async def test_a_cancellation_at_every_await_leaks_nothing(where):
    reached, engine_calls = asyncio.Event(), []

    async def wait_once(name):
        if name == where and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()

    class Engine(ScriptedEngine):
        async def generate(self, request):
            await wait_once("generate")
            return await super().generate(request)

        async def release(self, session):
            await wait_once("release")
            engine_calls.append(session)
            await super().release(session)

    class Waiting(World):
        async def reset(self, task, seed):
            await wait_once("reset")
            return await super().reset(task, seed)

        async def step(self, message, key):
            await wait_once("step")
            return await super().step(message, key)

        async def close(self):
            await wait_once("close")
            await super().close()

    before = asyncio.all_tasks()
    engine, world = Engine(lambda _: DONE), Waiting()
    task = asyncio.create_task(play_episode(make_plan(), world, CharRenderer(), engine))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert world.closed >= 1
    assert engine.sessions(0) == 0
    assert engine_calls
    assert asyncio.all_tasks() == before


async def test_no_thread_and_no_timer_is_left(monkeypatch):
    threads = set(threading.enumerate())
    loop = asyncio.get_running_loop()
    handles = []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *a, **k: handles.append(call_at(*a, **k)) or handles[-1])
    await play(ScriptedEnvironment(), says(char_call(1), DONE))
    assert handles
    assert all(handle.cancelled() for handle in handles), "a timer outlives its episode"
    assert set(threading.enumerate()) == threads


async def test_an_invalid_step_status_that_goes_on_is_no_fault():
    answers = iter([goes_on(status=Status.MODEL_BAD_PLAN), goes_on(status=Status.SAFETY_BLOCK), ends(1.0)])
    played = await play(World(lambda _: next(answers)), says(DONE))
    assert played.score == 1.0
    assert [turn.status for turn in played.episode.turns[1::2]] == ["MODEL_BAD_PLAN", "SAFETY_BLOCK", "OK"]
