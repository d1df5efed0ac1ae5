"""Independent streams from names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.platform.seeding import FIRST_SPLIT_SEED, derive_seed, nth_seed, split_seed

parts = st.lists(
    st.integers() | st.text(st.characters(codec="utf-8", exclude_characters="\x1f")), min_size=1, max_size=4
)


def test_a_seed_is_for_ever():
    """Stored episodes and task sets depend on it: a change is a decision, not noise."""
    assert [derive_seed("lookup", 0, "train", n) % 1000 for n in range(4)] == [56, 113, 759, 779]


@given(parts)
def test_seeds_are_63_bits(names):
    seed = derive_seed(*names)
    assert 0 <= seed < 2**63
    assert all(0 <= nth_seed(seed, index) < 2**63 for index in (0, 1, 2**40))


@given(parts, parts)
def test_other_parts_or_another_order_give_another_seed(one, other):
    if [str(part) for part in one] != [str(part) for part in other]:
        assert derive_seed(*one) != derive_seed(*other)
    turned = one[::-1]
    if [str(part) for part in turned] != [str(part) for part in one]:
        assert derive_seed(*turned) != derive_seed(*one)


def test_parts_do_not_run_together():
    assert derive_seed("a", "bc") != derive_seed("ab", "c")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed("a", "") != derive_seed("a")


def test_the_seeds_of_a_stream_differ_and_lie_everywhere():
    seeds = [nth_seed(derive_seed("stream"), index) for index in range(5000)]
    assert len(set(seeds)) == 5000
    thirds = [sum(low <= seed < low + 2**61 for seed in seeds) for low in range(0, 2**63, 2**61)]
    assert min(thirds) > 1000


def test_streams_of_neighbours_do_not_meet():
    streams = [{nth_seed(derive_seed("episode", n), index) for index in range(64)} for n in range(64)]
    assert len(set.union(*streams)) == 64 * 64


# case V2
@given(parts, parts)
def test_splits_never_have_a_seed_of_one_another(one, other):
    seeds = [split_seed("train", *one), split_seed("dev", *other), split_seed("hidden", *one)]
    assert [seed >> 61 for seed in seeds] == [1, 2, 3]
    assert all(FIRST_SPLIT_SEED <= seed < 2**63 for seed in seeds)
    assert [seed >> 31 >> 30 for seed in seeds] == [1, 2, 3], "also what is left of them in 32 bits"


def test_the_seeds_of_a_split_differ_and_are_for_ever():
    seeds = [split_seed("dev", "task", n) for n in range(5000)]
    assert len(set(seeds)) == 5000
    assert [seed % 1000 for seed in seeds[:4]] == [289, 498, 363, 185]


def test_there_are_three_splits():
    with pytest.raises(ValueError, match="no split 'test'; known: train, dev, hidden"):
        split_seed("test", 1)
