"""The episode that the transport benchmark carries is one that the product would carry."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from transport_episode import RAW_BYTES, make_episode, payload_bytes
from transport_flat import Flatness

from headrace.platform.fidelity import check_episode
from headrace.platform.records.codec import episode_codec


def test_the_episode_is_sound_and_of_the_size_that_peers_were_measured_with():
    episode = make_episode(7)
    check_episode(episode)
    arrays = _all_arrays(episode)
    assert sum(array.nbytes for array in arrays) == RAW_BYTES == 20_800
    assert RAW_BYTES < payload_bytes() < 1.3 * RAW_BYTES
    again = episode_codec.decode(episode_codec.encode(episode))
    assert all(np.array_equal(*pair) for pair in zip(arrays, _all_arrays(again), strict=True))


def _all_arrays(episode):
    return [
        array
        for turn in episode.turns
        for array in (
            turn.token_ids,
            turn.action_mask,
            turn.behaviour_logprobs,
            *(column.values for column in turn.token_columns.values()),
        )
    ]


def test_growth_is_the_worst_depth_over_the_first_turn_by_turn():
    assert Flatness.growth({1: [1.0, 2.0, 4.0], 10: [1.1, 2.0, 4.4], 100: [1.5, 1.0, 8.0]}) == 1.5
