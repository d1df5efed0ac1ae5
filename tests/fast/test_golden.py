"""The golden episodes: what earlier builds recorded is read, and replays equal, in this one."""

from typing import get_args

import pytest
from golden.record import EPISODES, SCENARIOS, record

from headrace.actors.environments.faulty import with_recorded_faults
from headrace.actors.replay import replay_episode
from headrace.platform.config.faults import FaultKind
from headrace.platform.fidelity import check_episode
from headrace.platform.records import FaultOwner, Status, StopReason
from headrace.platform.records.codec import episode_codec

NAMES = sorted(SCENARIOS)


def golden(name):
    return episode_codec.decode((EPISODES / f"{name}.msgpack").read_bytes())


@pytest.mark.parametrize("name", NAMES)
async def test_a_golden_episode_replays_equal(name):
    episode = golden(name)
    check_episode(episode)
    world = with_recorded_faults(SCENARIOS[name].world(), episode.injected_faults)
    report = await replay_episode(episode, world)
    assert (report.equal, report.differences) == (True, ())
    assert report.steps == len(episode.views)
    assert bool(report.from_record) == (episode.stop_reason in (StopReason.FAULT, StopReason.MAX_SECONDS))
    assert report.fidelity_gap == sum(map(len, episode.external.values()))


@pytest.mark.parametrize("name", NAMES)
async def test_recording_again_gives_the_same_bytes(name):
    """Anything else is a decision, and visible: run tests/golden/record.py."""
    assert episode_codec.encode(await record(name)) == (EPISODES / f"{name}.msgpack").read_bytes()


def test_the_set_has_every_ending_and_every_fault():
    """But a cancelled one, which is never stored."""
    episodes = [golden(name) for name in NAMES]
    assert sorted(path.stem for path in EPISODES.glob("*")) == NAMES
    assert {episode.stop_reason for episode in episodes} == {*StopReason} - {StopReason.CANCELLED}
    assert {turn.status for episode in episodes for turn in episode.turns} >= {
        Status.OK,
        Status.MODEL_INVALID_ACTION,
        Status.ENV_TRANSIENT,
    }
    assert {episode.status for episode in episodes} == {
        Status.OK,
        Status.MODEL_INVALID_ACTION,
        Status.ENV_TRANSIENT,
        Status.BUDGET_EXHAUSTED,
    }
    assert {fault.kind for episode in episodes for fault in episode.injected_faults} == {*get_args(FaultKind)}
    assert any(episode.external for episode in episodes)
    assert any(episode.parent_episode for episode in episodes)


def test_a_budget_that_ran_out_is_a_truncated_episode_and_a_killed_box_a_fault():
    """P27: nobody is to blame for the one, and the infrastructure for the other; what was done before is there."""
    slow, killed = golden("slow_max_seconds"), golden("sandbox_killed")
    assert (slow.status, slow.truncated, slow.fault_owner) == (Status.BUDGET_EXHAUSTED, True, FaultOwner.NONE)
    assert (killed.status, killed.truncated, killed.fault_owner) == (
        Status.ENV_TRANSIENT,
        False,
        FaultOwner.INFRASTRUCTURE,
    )
    assert [len(each.views) for each in (slow, killed)] == [2, 2]


def test_the_files_stay_small():
    assert sum(path.stat().st_size for path in EPISODES.glob("*")) < 100_000
