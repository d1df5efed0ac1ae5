"""Drawing tokens from logits, for a whole batch at once.

Owns the random numbers and the distribution. Invariants: a draw depends on (seed, position) and on its own row of
logits only, never on batch mates; the logprob returned is that of the distribution drawn from. Work is done in
float64, so that the cumulative sum of a large vocabulary keeps every token.
"""

# B rows of a batch, V vocabulary, K tokens kept by a truncation

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from headrace.platform.records.generation import SamplingParams

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11, _ONE = (np.uint64(n) for n in (30, 27, 31, 11, 1))


def _mix(x: U64) -> U64:
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def uniforms(seeds: U64, positions: I64) -> F64:
    """A number in [0, 1) for each (seed, position): output `position` of SplitMix64 started at the mixed seed.

    SplitMix64 is a counter through a mixing function (Steele, Lea and Flood, OOPSLA 2014), so any element of a stream
    costs the same, and a request that goes on from a recorded prefix draws what it would have drawn.
    """
    start = _mix(seeds + _GOLDEN)
    bits = _mix(start + (positions.astype(np.uint64) + _ONE) * _GOLDEN)
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def is_plain(sampling: SamplingParams) -> bool:
    """Sampling over the full vocabulary at a temperature, the only kind that training episodes use."""
    return sampling.temperature > 0 and sampling.top_p >= 1 and sampling.top_k <= 0 and sampling.min_p <= 0


def draw(
    logits: npt.NDArray[np.float32], temperatures: F64, numbers: F64, truncated: Mapping[int, SamplingParams]
) -> tuple[I64, F64]:
    """Sample one token a row by inverse transform.

    Args:
        logits: [B, V].
        temperatures: [B]; ignored where it is zero, which is a row of `truncated`.
        numbers: [B], uniform in [0, 1).
        truncated: the parameters of the rows that are not `is_plain`.

    Returns:
        Token ids [B] and their logprobs [B]. A row whose logits have no distribution (not finite) gets token -1.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = logits.astype(np.float64)
        scaled /= np.where(temperatures > 0, temperatures, 1.0)[:, None]
        scaled -= scaled.max(axis=1, keepdims=True)
        for row, sampling in truncated.items():
            scaled[row] = _truncate(scaled[row], sampling)
        cumulative = np.exp(scaled).cumsum(axis=1)
        total = cumulative[:, -1]
        # Below the total even after rounding, so that the last token with any weight is the last that can be drawn.
        target = np.minimum(numbers * total, np.nextafter(total, 0.0))
        tokens = (cumulative <= target[:, None]).sum(axis=1)
        sound = np.isfinite(total)
        tokens = np.where(sound, tokens, 0)
        logprobs = np.where(sound, scaled[np.arange(len(tokens)), tokens] - np.log(total), 0.0)
        return np.where(sound, tokens, -1), logprobs


def _truncate(scaled: F64, sampling: SamplingParams) -> F64:
    """One row [V] with everything outside the kept set at minus infinity: top-k, then top-p of what is left, then
    min-p relative to the likeliest token. Temperature zero keeps the likeliest alone."""
    if not np.isfinite(scaled.max()):
        return scaled
    order = np.argsort(-scaled, kind="stable")
    kept = 1 if sampling.temperature <= 0 else len(order)
    if sampling.top_k > 0:
        kept = min(kept, sampling.top_k)
    weights = np.exp(scaled[order[:kept]])
    if sampling.top_p < 1:
        before = (weights.cumsum() - weights) / weights.sum()
        kept = max(1, int((before < sampling.top_p).sum()))
    if sampling.min_p > 0:
        kept = max(1, min(kept, int((weights >= sampling.min_p * weights[0]).sum())))
    result = np.full_like(scaled, -np.inf)
    result[order[:kept]] = scaled[order[:kept]]
    return result
