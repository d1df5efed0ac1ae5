"""What every `LearnerBackend` must do. Run each function of `BACKEND_SUITE` on a case of yours.

Batches are the backend's own type, so the case makes them: `batch(seed)` one to train on, of several samples, and
`poisoned(seed)` the same with one episode whose loss is not finite.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.platform.contracts import Algorithm, LearnerBackend
from headrace.platform.records.arrays import F32


@dataclass(frozen=True, kw_only=True)
class BackendCase:
    """How to make a backend, always with the same weights, and batches for it.

    `reorder` returns the batch with its samples in another order; `lengths` the token count of each sample, in order;
    `bad_episode` the id that `poisoned` batches must be blamed on.
    """

    backend: Callable[[], LearnerBackend]
    algorithm: Callable[[], Algorithm]
    batch: Callable[[int], Any]
    poisoned: Callable[[int], Any]
    reorder: Callable[[Any], Any]
    lengths: Callable[[Any], Sequence[int]]
    bad_episode: str
    tolerance: float = 1e-5


async def a_step_reports_and_changes_the_weights(case: BackendCase) -> None:
    """loss, loss_tokens and grad_norm are there and finite; the weights move."""
    backend = case.backend()
    before = dict(backend.weights())
    statistics = backend.step(case.batch(0), case.algorithm())
    for name in ("loss", "loss_tokens", "grad_norm"):
        assert math.isfinite(statistics.get(name, math.nan)), f"step must report a finite {name}: {dict(statistics)}"
    assert statistics["loss_tokens"] > 0, "no token entered the loss"
    assert dict(backend.weights()) != before, "the weights are as they were before the step"


async def logprobs_match_the_samples(case: BackendCase) -> None:
    """One f32 row per sample, as long as its tokens, in the batch's order, never above 0."""
    batch = case.batch(0)
    rows = case.backend().logprobs(batch)
    assert [len(row) for row in rows] == list(case.lengths(batch)), "logprobs do not have the samples' lengths"
    assert all(row.dtype == np.float32 and float(row.max()) <= 0.0 for row in rows), "logprobs are f32 and at most 0"


async def the_same_seed_gives_the_same_run(case: BackendCase) -> None:
    """Two backends with the same weights, same batches: equal to the last digit."""
    one, other = case.backend(), case.backend()
    for seed in range(3):
        first = dict(one.step(case.batch(seed), case.algorithm()))
        second = dict(other.step(case.batch(seed), case.algorithm()))
        assert first == second, f"step {seed} differs: {first} and {second}"
    assert dict(one.weights()) == dict(other.weights()), "equal steps left unequal weights"


async def arrival_order_does_not_matter(case: BackendCase) -> None:
    """The same episodes in another order: the same loss and weights (case V6)."""
    one, other = case.backend(), case.backend()
    batch = case.batch(0)
    first = one.step(batch, case.algorithm())
    second = other.step(case.reorder(batch), case.algorithm())
    assert abs(first["loss"] - second["loss"]) <= case.tolerance, f"losses {first['loss']} and {second['loss']}"
    _close(one.logprobs(batch), other.logprobs(batch), case.tolerance, "after the two steps")


async def a_saved_state_goes_on_exactly(case: BackendCase) -> None:
    """Restored into a fresh backend, the next step is the one that would have come."""
    one = case.backend()
    one.step(case.batch(0), case.algorithm())
    saved = dict(one.save())
    expected = dict(one.step(case.batch(1), case.algorithm()))
    other = case.backend()
    other.step(case.batch(2), case.algorithm())
    other.restore(saved)
    found = dict(other.step(case.batch(1), case.algorithm()))
    assert found == expected, f"after a restore the next step is {found}, not {expected}"
    assert dict(one.weights()) == dict(other.weights()), "after a restore the next weights differ"


async def a_step_that_is_not_finite_changes_nothing(case: BackendCase) -> None:
    """ArithmeticError names the episode; weights and optimizer are as before."""
    backend, untouched = case.backend(), case.backend()
    before = dict(backend.weights())
    try:
        backend.step(case.poisoned(0), case.algorithm())
    except ArithmeticError as error:
        assert case.bad_episode in str(error), f"the error does not name {case.bad_episode}: {error}"
    else:
        raise AssertionError("a loss that is not finite must raise ArithmeticError")
    assert dict(backend.weights()) == before, "a refused step changed the weights"
    found, expected = (dict(b.step(case.batch(1), case.algorithm())) for b in (backend, untouched))
    assert found == expected, f"a refused step changed the next one: {found}, not {expected}"


async def weights_are_a_model_folder(case: BackendCase) -> None:
    """The configuration, a model's or an adapter's, and safetensors, as bytes; asking twice gives the same."""
    backend = case.backend()
    files: Mapping[str, bytes] = backend.weights()
    assert {"config.json", "adapter_config.json"} & set(files), f"no configuration among {sorted(files)}"
    assert any(name.endswith(".safetensors") for name in files), f"no safetensors among {sorted(files)}"
    assert dict(files) == dict(backend.weights()), "weights() without a step in between gives other bytes"


def _close(first: Sequence[F32], second: Sequence[F32], tolerance: float, when: str) -> None:
    gap = max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))
    assert gap <= tolerance, f"logprobs {when} differ by {gap}"


BACKEND_SUITE: dict[str, Callable[[BackendCase], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        a_step_reports_and_changes_the_weights,
        logprobs_match_the_samples,
        the_same_seed_gives_the_same_run,
        arrival_order_does_not_matter,
        a_saved_state_goes_on_exactly,
        a_step_that_is_not_finite_changes_nothing,
        weights_are_a_model_folder,
    )
}
