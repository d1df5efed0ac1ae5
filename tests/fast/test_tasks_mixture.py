"""Mixing environments: exact shares, whole epochs, and nothing but the group's number decides."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.tasks.mixture import BLOCK, Mixture, shares_of

weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8)


@given(weights, st.integers(8, 2000))
def test_shares_add_up_and_are_right_to_one(given_weights, size):
    counts = shares_of(given_weights, size)
    assert sum(counts) == size
    assert min(counts) >= 1
    exact = [size * weight / sum(given_weights) for weight in given_weights]
    tiny = sum(share < 1 for share in exact)
    assert all(abs(count - share) < 1 + tiny for count, share in zip(counts, exact, strict=True))


@pytest.mark.parametrize(
    ("given_weights", "counts"),
    [
        ([1], (1000,)),
        ([3, 1], (750, 250)),
        ([1, 1, 1], (334, 333, 333)),
        ([1e-9, 1], (1, 999)),
        ([1] * 1000, (1,) * 1000),
    ],
)
def test_shares_by_hand(given_weights, counts):
    assert shares_of(given_weights, 1000) == counts


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(0, 50), st.integers(0, 4))
def test_every_block_has_the_exact_shares(given_weights, seed, block):
    mixture = Mixture(given_weights, seed, "train")
    played = Counter(mixture.place(group)[0] for group in range(block * BLOCK, (block + 1) * BLOCK))
    assert tuple(played[number] for number in range(len(given_weights))) == mixture.counts


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(0, 50), st.integers(1, 3 * BLOCK))
def test_each_environment_counts_its_own_groups_without_gaps(given_weights, seed, groups):
    mixture = Mixture(given_weights, seed, "train")
    positions: dict[int, list[int]] = {}
    for group in range(groups):
        number, position = mixture.place(group)
        positions.setdefault(number, []).append(position)
    assert all(own == list(range(len(own))) for own in positions.values())


@settings(max_examples=25, deadline=None)
@given(weights, st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_only_the_number_of_the_group_decides(given_weights, groups):
    one, two = Mixture(given_weights, 3, "train"), Mixture(given_weights, 3, "train")
    assert [one.place(group) for group in groups] == [two.place(group) for group in reversed(groups)][::-1]


def environments(given_weights, groups, seed=0, split="train"):
    mixture = Mixture(given_weights, seed, split)
    return [mixture.place(group)[0] for group in range(groups)]


def test_seeds_and_splits_mix_differently():
    orders = {tuple(environments([1, 1], 50, seed, split)) for seed in range(3) for split in ("train", "dev")}
    assert len(orders) == 4, "evaluation plays in one order"


class TestEvaluation:
    @pytest.mark.parametrize(
        ("given_weights", "order"),
        [
            ([9, 1], "ABAAAAAAAAAAAAAAAAAB"),
            ([1, 9], "ABBBBBBBBBBBBBBBBBAB"),
            ([1, 1, 1], "ABCABCABC"),
            ([3, 1], "ABAAAAABAAAB"),
            ([1e-9, 1, 1e-9], "ABCBBBBB"),
        ],
    )
    def test_by_hand(self, given_weights, order):
        got = "".join("ABC"[number] for number in environments(given_weights, len(order), split="dev"))
        assert got[: len(given_weights)] == order[: len(given_weights)]
        assert got == order

    @settings(max_examples=25, deadline=None)
    @given(weights, st.sampled_from(["dev", "hidden"]), st.integers(0, 2))
    def test_every_environment_is_played_first_and_every_beginning_has_the_shares(self, given_weights, split, seed):
        number = len(given_weights)
        mixture, order = Mixture(given_weights, seed, split), environments(given_weights, 2 * BLOCK, seed, split)
        assert order[:number] == list(range(number))
        given, size = [0] * number, sum(mixture.counts)
        for place, environment in enumerate(order, 1):
            given[environment] += 1
            ahead = [mine - place * count / size for mine, count in zip(given, mixture.counts, strict=True)]
            assert max(ahead) < 1 + 1e-9
            behind = -min(ahead)
            assert behind < (1 + 1e-9 if place > BLOCK else number)

    @settings(max_examples=25, deadline=None)
    @given(weights, st.integers(0, 3))
    def test_blocks_are_exact_and_have_no_gaps(self, given_weights, block):
        mixture = Mixture(given_weights, 0, "dev")
        places = [mixture.place(group) for group in range(block * BLOCK, (block + 1) * BLOCK)]
        for environment, count in enumerate(mixture.counts):
            own = [position for number, position in places if number == environment]
            assert own == list(range(block * count, (block + 1) * count))


def test_one_environment_plays_position_by_position():
    mixture = Mixture([0.3], 0, "train")
    assert [mixture.place(group) for group in (0, 5, 10**9)] == [(0, 0), (0, 5), (0, 10**9)]


def test_a_mixture_is_for_ever():
    """A stored dispatch sequence means the same tasks with the next version of every library."""
    mixture = Mixture([2, 1], 0, "train")
    assert [mixture.place(group) for group in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3)]
