"""What the recorder adds up, apart from whole episodes."""

import numpy as np
import pytest
from episode_kit import DONE, World, char_call, ends, make_plan, play, says

from headrace.actors.recorder import Recorder, as_step_message, joined_text
from headrace.platform.records import Message, Observation, RewardComponent, RewardKind, Role, StepResult
from headrace.platform.records.message import Cost
from headrace.platform.testing.fakes.environment import ScriptedEnvironment


def test_a_score_is_the_sum_of_valid_components_or_nothing():
    recorder = Recorder(episode_id="e")
    assert recorder.score() is None
    recorder.reward([RewardComponent(RewardKind.OUTCOME, 1.0), RewardComponent(RewardKind.COST, -0.25)])
    assert recorder.score() == 0.75
    recorder.reward([RewardComponent(RewardKind.SAFETY, valid=False)])
    assert recorder.score() is None


@pytest.mark.parametrize("length", [0, 1, 5000, 70_000])
def test_fillers_have_the_length_of_the_turn_and_cannot_be_changed(length):
    recorder = Recorder(episode_id="e")
    recorder.prompt((Message(Role.USER, "x"),), Observation(()), [1] * length)
    (turn,) = recorder.turns
    assert turn.token_ids.shape == turn.action_mask.shape == turn.behaviour_logprobs.shape == (length,)
    assert not turn.action_mask.any()
    assert not turn.behaviour_logprobs.any()
    assert (turn.action_mask.dtype, turn.behaviour_logprobs.dtype) == (np.uint8, np.float32)
    for filler in (turn.action_mask, turn.behaviour_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            filler[:] = 1


async def test_costs_are_those_that_the_world_states():
    results = iter([StepResult((Message(Role.TOOL, "a"),), cost=Cost(tool_calls=2, money=0.5)), ends(1.0)])
    played = await play(World(lambda _: next(results)), says(DONE))
    cost = played.episode.cost
    assert (cost.tool_calls, cost.money, cost.sampled_tokens) == (2, 0.5, 2 * len(DONE))
    assert [turn.cost.tool_calls for turn in played.episode.turns if turn.is_action] == [2, 0]
    assert cost.tool_s == pytest.approx(sum(turn.cost.tool_s for turn in played.episode.turns))


async def test_times_run_forwards_within_the_episode():
    played = await play(ScriptedEnvironment(), says(char_call(1), DONE), plan=make_plan(dispatched_s=1000.0))
    episode = played.episode
    times = [time for turn in episode.turns if turn.is_action for time in (turn.started_s, turn.ended_s)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= episode.duration_s
    stamps = episode.stamps
    assert 1000.0 == stamps.dispatched_s <= stamps.first_token_s <= stamps.done_s


async def test_the_final_state_is_that_of_the_last_step():
    played = await play(ScriptedEnvironment(), says(char_call(1), DONE))
    actions = [turn for turn in played.episode.turns if turn.is_action]
    assert played.episode.final_state_hash == actions[-1].state_hash.canonical
    assert actions[0].state_hash != actions[1].state_hash


async def test_a_turn_gives_back_the_message_that_made_it():
    world = World(lambda _: ends(1.0))
    played = await play(world, says([*b"so ", *char_call(3), *char_call(4), 261]))
    assert [as_step_message(turn) for turn in played.episode.turns if turn.is_action] == world.messages


def test_several_messages_are_one_text():
    assert joined_text([Message(Role.TOOL, "a")]) == "a"
    assert joined_text([Message(Role.TOOL, "a"), Message(Role.TOOL, "")]) == "a\n"
