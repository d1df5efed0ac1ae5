"""Faults on purpose: where they strike, what they do to a step, what is recorded, and that replays go the same way."""

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from box_kit import KitProvider
from episode_kit import DONE, char_call, make_plan, play, says
from evaluation_kit import evaluation, outcome
from pydantic import ValidationError

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.faulty import check_faults, with_faults, with_recorded_faults
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.outcomes import EnvironmentCounts, outcome_of
from headrace.platform.config.faults import FaultConfig
from headrace.platform.errors import ConfigError, DeadlineExceeded, EnvironmentFault, SandboxDied
from headrace.platform.evaluation.record import evaluation_facts
from headrace.platform.evaluation.summary import summarize
from headrace.platform.hashing import hash_value
from headrace.platform.records import (
    InjectedFault,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    Status,
    StepResult,
    StopReason,
    Task,
)
from headrace.platform.testing.fakes.environment import ScriptedEnvironment

TASK = Task("t", "tally", {"limit": 4})


class Tally(ReplayedEnvironment):
    """Writes down what is said; ends after four. Two tool answers a step."""

    name, version = "tally", "1"
    resets = 0

    def tools(self):
        return ()

    async def _reset(self, task, seed):
        self.said, self.limit = [], task.data["limit"]
        self.resets += 1
        return Observation((Message(Role.USER, "say"),), hash_value(self.said))

    async def _step(self, message):
        self.said.append(message.content)
        over = len(self.said) >= self.limit
        seen = tuple(Message(Role.TOOL, str(self.said), tool_call_id=f"call_{n}") for n in range(2))
        rewards = (RewardComponent(RewardKind.OUTCOME, 1.0),) if over else ()
        return StepResult(() if over else seen, rewards=rewards, terminated=over, state_hash=hash_value(self.said))


class Boxed(SandboxedEnvironment, Tally):
    """The same, beside a box that it never uses."""


def say(text):
    return Message(Role.ASSISTANT, text)


def always(kind, *steps, **fields):
    return FaultConfig(kind=kind, steps=steps or (2,), **fields)


async def outcomes(session, seed=0, steps=4):
    """What a session answers, errors included, until it breaks or ends."""
    answers = []
    try:
        answers.append(await session.reset(TASK, seed))
        for number in range(steps):
            answers.append(await session.step(say("abcd"[number]), f"k/{number}"))
            if answers[-1].terminated:
                break
    except Exception as error:
        answers.append(error)
    return answers


def texts(answers):
    return [repr(each) if isinstance(each, Exception) else msgspec.json.encode(each) for each in answers]


def struck(session):
    return [(fault.turn, fault.kind) for fault in session.provenance.injected_faults]


# --- where they strike ------------------------------------------------------------------------------------------------


async def where(faults, seed, first=True):
    session = with_faults(Tally(), faults, seed, first)
    await session.reset(Task("t", "tally", {"limit": 99}), 0)
    for number in range(20):
        await session.step(say("a"), str(number))
    return struck(session)


async def test_the_same_seed_meets_the_same_faults_and_another_others():
    faults = [FaultConfig(kind="lost_reply", rate=0.3), FaultConfig(kind="changed_page", rate=0.3)]
    found = await where(faults, seed=1)
    assert found == await where(faults, seed=1)
    assert found != await where(faults, seed=2), "a retry has another seed"
    assert 4 <= len(found) <= 20
    assert sorted(found) == sorted(await where(faults[::-1], seed=1)), "the order of the entries does not matter"
    alone = await where(faults[:1], seed=1)
    assert alone == [each for each in found if each[1] == "lost_reply"], "nor do other entries"


async def test_rates_are_chances_a_step():
    counts = [len(await where([FaultConfig(kind="lost_reply", rate=0.25)], seed)) for seed in range(40)]
    assert sum(counts) / (40 * 20) == pytest.approx(0.25, abs=0.05)
    assert len(await where([FaultConfig(kind="lost_reply", rate=1.0)], 0)) == 20


async def test_fixed_steps_strike_in_first_attempts_only():
    faults = [always("changed_page", 1, 3)]
    assert await where(faults, seed=0) == [(1, "changed_page"), (3, "changed_page")]
    assert await where(faults, seed=0, first=False) == []


def test_without_faults_there_is_nothing_in_between():
    world = Tally()
    assert with_faults(world, (), 0, True) is world
    assert with_recorded_faults(world, ()) is world


async def test_a_second_reset_begins_anew():
    session = with_faults(Tally(), [always("changed_page")], 0, True)
    first = texts(await outcomes(session))
    assert texts(await outcomes(session)) == first
    assert struck(session) == [(2, "changed_page")]


# --- what they do, and that a replay does it again --------------------------------------------------------------------


async def both_ways(make, fault):
    """Answers, wrapper and world when the fault strikes, after a replay from its record was found to be the same."""
    world = make()
    session = with_faults(world, [fault], seed=0, first=True)
    answers = await outcomes(session)
    injected = msgspec.msgpack.decode(
        msgspec.msgpack.encode(session.provenance.injected_faults), type=tuple[InjectedFault, ...]
    )
    fresh = make()
    replay = with_recorded_faults(fresh, injected)
    assert texts(await outcomes(replay)) == texts(answers)
    assert replay.provenance.injected_faults == injected
    assert fresh.said == world.said
    return answers, session, world


async def test_a_time_out_fails_as_a_step_that_outran_its_deadline():
    answers, session, world = await both_ways(Tally, always("timeout", seconds=0.05))
    assert isinstance(answers[-1], DeadlineExceeded)
    assert world.said == ["a"], "the step is not done"
    assert session.provenance.injected_faults == (InjectedFault(2, "timeout", {"seconds": 0.05}),)


async def test_a_time_out_takes_its_time_and_its_replay_none():
    session = with_faults(Tally(), [always("timeout", seconds=0.2)], seed=0, first=True)
    began = time.monotonic()
    await outcomes(session)
    assert time.monotonic() - began >= 0.2
    slow = with_recorded_faults(Tally(), [InjectedFault(2, "timeout", {"seconds": 600.0})])
    assert "600.0 s" in str((await outcomes(slow))[-1])


# case X3
async def test_a_lost_reply_is_asked_for_again_and_acts_once():
    answers, session, world = await both_ways(Tally, always("lost_reply"))
    assert world.said == ["a", "b", "c", "d"]
    assert texts(answers) == texts(await outcomes(Tally()))
    assert struck(session) == [(2, "lost_reply")]


async def test_a_duplicate_acts_twice_and_its_reply_is_the_first_one():
    answers, session, world = await both_ways(Tally, always("duplicate_effect"))
    plain = await outcomes(Tally())
    assert world.said == ["a", "b", "b", "c"]
    assert answers[2].messages == plain[2].messages
    assert answers[2].state_hash == hash_value(["a", "b", "b"]) != plain[2].state_hash
    assert (len(answers), answers[-1].terminated) == (4, True)
    assert struck(session) == [(2, "duplicate_effect")]


async def test_a_duplicate_that_ends_the_world_ends_it_with_its_reward():
    answers, _, world = await both_ways(Tally, always("duplicate_effect", 3))
    assert world.said == ["a", "b", "c", "c"]
    assert (answers[3].terminated, answers[3].rewards[0].value) == (True, 1.0)
    assert answers[3].messages == (await outcomes(Tally()))[3].messages


async def test_what_has_ended_is_not_done_again():
    answers, session, world = await both_ways(Tally, always("duplicate_effect", 4))
    assert world.said == ["a", "b", "c", "d"]
    assert answers[-1].terminated and struck(session) == []


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("server_error", "", "HTTP 500 Internal Server Error. The tool is not available now."),
        ("server_error", "503", "503"),
        ("changed_page", "", "This page has changed. What was here is gone."),
        ("changed_page", "a new page", "a new page"),
    ],
)
async def test_another_text_is_told_and_the_world_is_as_it_was(kind, text, told):
    answers, session, _ = await both_ways(Tally, always(kind, text=text))
    plain = await outcomes(Tally())
    assert [(m.content, m.tool_call_id, m.role) for m in answers[2].messages] == [
        (told, "call_0", Role.TOOL),
        (told, "call_1", Role.TOOL),
    ]
    assert msgspec.structs.replace(answers[2], messages=()) == msgspec.structs.replace(plain[2], messages=())
    assert answers[2].status is Status.OK
    assert texts(answers[3:]) == texts(plain[3:])
    assert session.provenance.injected_faults == (InjectedFault(2, kind, {"text": told}),)


async def test_an_end_that_says_nothing_has_no_text_to_change():
    answers, session, _ = await both_ways(Tally, always("changed_page", 4))
    assert answers[-1].terminated and struck(session) == []


# case E18
async def test_a_failed_reset_may_be_tried_again():
    answers, session, world = await both_ways(failing_to_reset, FaultConfig(kind="failed_reset", rate=1.0))
    assert isinstance(answers[0], EnvironmentFault) and answers[0].transient
    assert (struck(session), world.resets) == ([(0, "failed_reset")], 0)


def failing_to_reset():
    world = Tally()
    world.said = []
    return world


# case E13
async def test_a_killed_sandbox_ends_the_step_and_its_replay_needs_none():
    provider = KitProvider()

    def boxed():
        world = Boxed()
        world.use_sandboxes(provider)
        return world

    answers, session, world = await both_ways(boxed, always("kill_sandbox"))
    assert isinstance(answers[-1], SandboxDied)
    assert world.said == ["a"]
    assert len(provider.live) == 1, "the replay's box was not killed"
    assert session.provenance.sandbox_id
    cause = {"cause": str(answers[-1])}
    assert session.provenance.injected_faults == (InjectedFault(2, "kill_sandbox", cause),)
    replay = with_recorded_faults(Tally(), session.provenance.injected_faults)
    assert repr((await outcomes(replay))[-1]) == repr(answers[-1])


async def test_the_box_is_found_behind_an_adapter_and_its_absence_is_said():
    provider, world = KitProvider(), Boxed()
    world.use_sandboxes(provider)
    with ThreadPoolExecutor(1) as executor:
        session = with_faults(as_async(world, executor), [always("kill_sandbox")], 0, True)
        assert isinstance((await outcomes(session))[-1], SandboxDied)
    assert not provider.live
    (_, _, error) = await outcomes(with_faults(Tally(), [always("kill_sandbox")], 0, True))
    assert "no sandbox that could be killed" in str(error) and not error.transient


async def test_a_known_key_is_the_same_step_and_meets_the_same_faults():
    session = with_faults(Tally(), [always("changed_page"), always("duplicate_effect", 1)], 0, True)
    await session.reset(TASK, 0)
    for message, key in ((say("a"), "0"), (say("b"), "1")):
        first = await session.step(message, key)
        assert await session.step(message, key) == first  # P25
    assert session.inner.said == ["a", "a", "b"]
    assert struck(session) == [(1, "duplicate_effect"), (2, "changed_page")]


async def test_several_faults_strike_one_step():
    faults = [always("changed_page", text="b"), always("changed_page", text="c"), always("duplicate_effect")]
    session = with_faults(Tally(), [*faults, always("lost_reply")], 0, True)
    answers = await outcomes(session)
    assert answers[2].messages[0].content == "b", "of one kind the first entry strikes"
    replay = with_recorded_faults(Tally(), session.provenance.injected_faults)
    assert texts(await outcomes(replay)) == texts(answers)
    assert struck(session) == struck(replay) == [(2, "lost_reply"), (2, "duplicate_effect"), (2, "changed_page")]


# --- in an episode ----------------------------------------------------------------------------------------------------


async def played(*faults, first=True, world=None, **plan):
    session = with_faults(world or ScriptedEnvironment(), faults, 0, first)
    return await play(session, says(char_call(1), char_call(2), DONE), plan=make_plan(**plan))


async def test_the_record_has_what_was_put_in_and_the_episode_goes_on():
    done = await played(always("server_error"))
    assert done.score is not None
    (fault,) = done.episode.injected_faults
    assert (fault.turn, fault.kind) == (2, "server_error")
    assert [turn.content for turn in done.episode.turns if turn.role is Role.TOOL][1] == fault.detail["text"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (always("timeout"), "did not answer within 0.0 s"),
        (FaultConfig(kind="failed_reset", rate=1.0), "the reset failed"),
    ],
)
async def test_fatal_ones_are_transient_and_never_a_reward(fault, told):
    done = await played(fault)
    episode = done.episode
    assert (episode.status, episode.fault_owner) == (Status.ENV_TRANSIENT, "environment")
    assert (episode.stop_reason, done.score) == (StopReason.FAULT, None)
    assert told in episode.fault
    assert len(episode.injected_faults) == 1
    if fault.steps:
        assert (await played(fault, first=False)).score is not None, "the retry goes through"


async def test_a_time_out_that_lasts_longer_than_the_deadline_is_recorded_too():
    done = await played(always("timeout", seconds=60), step_deadline_s=0.05)
    assert done.episode.fault == "step outran its deadline"
    assert done.episode.injected_faults == (InjectedFault(2, "timeout", {"seconds": 60.0}),)


# case E13
async def test_a_killed_sandbox_is_the_machinerys_fault_at_once():
    provider, world = KitProvider(), Boxed()
    world.use_sandboxes(provider)
    done = await played(always("kill_sandbox", 1), world=world, task=TASK)
    episode = done.episode
    assert (episode.status, episode.fault_owner) == (Status.ENV_TRANSIENT, "infrastructure")
    assert (done.score, len(episode.turns)) == (None, 2)
    assert episode.fault.startswith("SandboxDied: ")
    assert episode.sandbox_id == "box-1" and episode.injected_faults[0].kind == "kill_sandbox"
    assert not provider.live


# --- recovery ---------------------------------------------------------------------------------------------------------


async def test_recovery_is_the_mean_score_after_faults_that_were_not_fatal():
    counts = EnvironmentCounts()
    episodes = [await played(), await played(always("server_error")), await played(always("timeout"))]
    for each in episodes:
        counts.add(each)
    counts = counts + EnvironmentCounts()
    assert (counts.struck, counts.recovered, counts.recovery) == (2, 1, episodes[1].score)
    assert [outcome_of(each, 0).injected_faults for each in episodes] == [0, 1, 1]
    assert EnvironmentCounts().recovery is None


def test_an_evaluation_reports_recovery_over_struck_episodes_only():
    made = evaluation(
        [
            outcome("a", 0.0),
            outcome("b", 1.0, injected_faults=1),
            outcome("c", 0.5, injected_faults=2),
            outcome("d", None, injected_faults=1),
        ]
    )
    figures = summarize(made).overall
    assert (figures.struck, figures.recovery.mean) == (3, 0.75)
    facts = evaluation_facts(made, summarize(made))
    assert (facts["struck"], facts["recovery"]) == (3, 0.75)
    assert summarize(evaluation([outcome("a", 1.0)])).overall.recovery is None


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "timeout"}, "never strikes"),
        ({"kind": "failed_reset", "steps": [1]}, "there is one reset"),
        ({"kind": "failed_reset"}, "there is one reset"),
        ({"kind": "timeout", "steps": [0]}, "counted from 1"),
        ({"kind": "lost_reply", "rate": 0.1, "text": "x"}, "text is for"),
        ({"kind": "lost_reply", "rate": 0.1, "seconds": 1}, "seconds is for"),
        ({"kind": "timeout", "rate": 1.1}, "less than or equal to 1"),
        ({"kind": "time_out", "rate": 0.1}, "'timeout'"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fields, told):
    with pytest.raises(ValidationError, match=told):
        FaultConfig(**fields)


def test_a_kill_needs_a_sandbox():
    faults = [FaultConfig(kind="kill_sandbox", rate=0.1)]
    check_faults(faults, can_kill=True)
    check_faults([always("timeout")], can_kill=False)
    with pytest.raises(ConfigError, match="sandbox: bubblewrap"):
        check_faults(faults, can_kill=False)
