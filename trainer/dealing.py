"""Microbatches dealt to the ranks of a learner, in rounds.

Ranks that share gradients or weights meet in every pass, so all of them make the same number of passes, and a round
takes as long as its largest microbatch. Hence microbatches of like size share a round, and there are as few rounds as
can be. Where the last round has fewer microbatches than ranks, the others compute the smallest one once more, without
weight. Pure: every rank deals the same from the same batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of one rank: of microbatch number `micro`, for nothing where `counts` is false."""

    micro: int
    counts: bool


def deal(sizes: Sequence[int], ranks: int) -> list[list[Pass]]:
    """For each rank its passes, in order; every rank has equally many.

    Args:
        sizes: tokens of each microbatch; at least one.
        ranks: how many share them.
    """
    ordered = sorted(range(len(sizes)), key=lambda n: (-sizes[n], n))
    smallest = ordered[-1]
    dealt: list[list[Pass]] = [[] for _ in range(ranks)]
    for number, start in enumerate(range(0, len(ordered), ranks)):
        members = [Pass(n, True) for n in ordered[start : start + ranks]]
        members += [Pass(smallest, False)] * (ranks - len(members))
        if number % 2:  # the larger ones of a round go to each end in turn
            members.reverse()
        for passes, member in zip(dealt, members, strict=True):
            passes.append(member)
    return dealt


def round_tokens(total: int, ranks: int, microbatch_tokens: int) -> int:
    """The most tokens of a microbatch, so that no rank is without one while another has two's worth."""
    return max(1, min(microbatch_tokens, -(-total // ranks)))
