"""What a group's returns are compared with. Pure functions of numbers.

A baseline that does not depend on the action leaves the gradient unbiased (Williams 1992, "Simple statistical
gradient-following algorithms", theorem 1). Dimensions: n members of a group, K_i policy turns of member i.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def over_mean(returns: Sequence[F64]) -> list[F64]:
    """Each return less the mean of all members' at the same turn: f64[K_i] each, from f64[K_i] each.

    A member that ended before counts with its last turn. The mean holds the member's own return, so the advantage is
    (n - 1) / n of the leave-one-out one.
    """
    table = _table(returns)
    return _cut(table - table.mean(0), returns)


def over_others(returns: Sequence[F64]) -> list[F64]:
    """Each return less the mean of the other members' at the same turn: f64[K_i] each; n is at least 2.

    A_i = R_i - 1/(n - 1) * sum over j != i of R_j.
    """
    table = _table(returns)
    others = (table.sum(0) - table) / (len(returns) - 1)
    return _cut(table - others, returns)


def relative(scores: F64, scale: str, epsilon: float) -> F64:
    """Scores f64[n] less their mean; with scale "std" also over their unbiased standard deviation plus `epsilon`."""
    centred: F64 = scores - scores.mean()
    return centred / (scores.std(ddof=1) + epsilon) if scale == "std" else centred


def _table(returns: Sequence[F64]) -> F64:
    """f64[n, longest], the last return of a shorter one repeated."""
    longest = max(len(one) for one in returns)
    return np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in returns])


def _cut(table: F64, returns: Sequence[F64]) -> list[F64]:
    return [row[: len(one)] for row, one in zip(table, returns, strict=True)]
