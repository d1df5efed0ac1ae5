"""How microbatches are dealt to ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.dealing import Pass, deal, round_tokens


def test_by_hand() -> None:
    """Neighbours in size share a round; the larger one goes to each end in turn; who has none repeats the smallest."""
    assert deal([5, 9, 7, 1, 3], 2) == [
        [Pass(1, True), Pass(4, True), Pass(3, True)],
        [Pass(2, True), Pass(0, True), Pass(3, False)],
    ]
    assert deal([4], 3) == [[Pass(0, True)], [Pass(0, False)], [Pass(0, False)]]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_each_counts_once_and_every_rank_makes_as_many_passes(sizes: list[int], ranks: int) -> None:
    dealt = deal(sizes, ranks)
    assert sorted(each.micro for passes in dealt for each in passes if each.counts) == list(range(len(sizes)))
    assert {len(passes) for passes in dealt} == {-(-len(sizes) // ranks)}
    rounds = [[sizes[each.micro] for each in together] for together in zip(*dealt, strict=True)]
    for larger, smaller in pairwise(rounds):
        assert min(larger) >= max(smaller), "what meets in a round is of like size"
    assert {sizes[each.micro] for passes in dealt for each in passes if not each.counts} <= {min(sizes)}


def test_no_rank_is_idle_while_another_has_twice_its_share() -> None:
    assert round_tokens(8000, 2, 8192) == 4000
    assert round_tokens(80_001, 2, 8192) == 8192
    assert round_tokens(3, 8, 8192) == 1
