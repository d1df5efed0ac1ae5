"""Which samples begin with the same tokens.

The episodes of a group begin with the same prompt, and often with the same first observations. What several samples
begin with needs to be computed only once, as a causal model's tokens depend on nothing that follows them. Found by
comparing tokens alone: no sample says which group it is of, and the result does not depend on the order of arrival
(case V6).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.platform.records.arrays import I32
from headrace.trainer.samples import Sample

FEWEST_SHARED = 8
"""A shorter beginning is not worth a part of its own."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples whose first `shared` tokens are the same; 0 where they are to be computed apart."""

    rows: tuple[Sample, ...]
    shared: int
    tokens: int
    """Of all rows."""

    @property
    def computed(self) -> int:
        """Tokens that a forward pass over the bundle computes."""
        return self.tokens - self.shared * (len(self.rows) - 1)


def bundles(samples: Sequence[Sample], most_tokens: int) -> list[Bundle]:
    """The samples by what they share, each bundle of at most `most_tokens` computed tokens.

    In order of their tokens, those that share most are neighbours; a sample joins the bundle before it as long as that
    saves more tokens than it costs, by making the shared beginning shorter. A sample that is longer than `most_tokens`
    by itself is a bundle of its own.
    """
    ordered = sorted(samples, key=_order)
    found: list[Bundle] = []
    for sample in ordered:
        joined = _joined(found[-1], sample) if found else None
        if joined is not None and joined.computed <= most_tokens:
            found[-1] = joined
        else:
            found.append(Bundle((sample,), 0, sample.length))
    return found


def singles(samples: Sequence[Sample]) -> list[Bundle]:
    """Every sample by itself, in order of length."""
    ordered = sorted(samples, key=lambda s: (s.length, s.episode_id, s.agent_id, s.segment))
    return [Bundle((sample,), 0, sample.length) for sample in ordered]


def _joined(bundle: Bundle, sample: Sample) -> Bundle | None:
    """`bundle` with `sample`, or None where they had better stay apart."""
    before = bundle.shared or bundle.rows[0].length
    shared = min(before, _common(bundle.rows[0].token_ids, sample.token_ids))
    if shared < FEWEST_SHARED:
        return None
    saved, would_be = bundle.shared * (len(bundle.rows) - 1), shared * len(bundle.rows)
    tokens = bundle.tokens + sample.length
    return Bundle((*bundle.rows, sample), shared, tokens) if would_be > saved else None


def _common(one: I32, other: I32) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _order(sample: Sample) -> tuple[bytes, str, str, int]:
    # Big-endian bytes of numbers that are not negative compare as the numbers do.
    return sample.token_ids.astype(">i4").tobytes(), sample.episode_id, sample.agent_id, sample.segment
