"""A learner's backend whose work is done by several ranks: every call goes to all, and their answers are merged.

Ranks agree among themselves before they step (P13) and refuse alike: what all of them raise is raised here, and they
go on. A rank that is lost, hangs or fails alone leaves the others in the middle of something: all of them are ended,
and the backend is of no use any more. The weights that count are then those of the newest checkpoint (P6).

Knows nothing of where ranks live: `Ranks` may be actors, processes or threads.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.platform.contracts import Algorithm
from headrace.platform.errors import PartDied, RunFailed
from headrace.platform.records.arrays import F32
from headrace.trainer.samples import Sample
from headrace.trainer.step_statistics import StatisticsBuilder, StepStatistics

GRACE_S = 5.0
"""How long the others are waited for when one has failed: the cause may be theirs."""
_ALIKE = (ArithmeticError, ValueError, LookupError, RunFailed)
"""What ranks raise with their state as it was; PartDied is none of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """What one rank knows of a step: the figures of its microbatches, and what all ranks have in common."""

    statistics: StatisticsBuilder
    grad_norm: float
    lr: float


class Ranks(Protocol):
    """The ranks of one learner, numbered from 0."""

    size: int

    def ask(self, method: str, *arguments: Any) -> Sequence[Future[Any]]:
        """Have every rank call that method of what it holds; one answer each, in their order. A rank that is gone
        answers with PartDied."""

    def end(self) -> None:
        """End every rank, whatever it is doing. Safe to call twice."""


class RankedBackend:
    """`LearnerBackend` over `Ranks`; see the module. Calls block, and are made one at a time.

    Args:
        ranks: up, each with its part of the model.
        deadline_s: how long a call may take.
        grace_s: see `GRACE_S`.
    """

    def __init__(self, ranks: Ranks, deadline_s: float, grace_s: float = GRACE_S) -> None:
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._ended = ""

    def step(self, batch: Sequence[Sample], algorithm: Algorithm) -> StepStatistics:
        """One optimizer step over `batch`, on all ranks.

        Raises:
            ArithmeticError: the loss or its gradient is not finite; names the episodes. Nothing has changed.
            RunFailed: the ranks were not about to take the same step. Nothing has changed.
            PartDied: a rank is lost; see the module.
            ValueError: no token of `batch` enters the loss.
        """
        answers = self._all("step", batch, algorithm)
        together = StatisticsBuilder()
        for answer in answers:
            together.merge(answer.statistics)
        return together.build(answers[0].grad_norm, answers[0].lr)

    def logprobs(self, batch: Sequence[Sample]) -> list[F32]:
        """See `LearnerBackend.logprobs`. Raises PartDied."""
        found: dict[int, F32] = {}
        for answer in self._all("logprobs", batch):
            found |= answer
        return [found[n] for n in range(len(batch))]

    def weights(self) -> dict[str, bytes]:
        """See `LearnerBackend.weights`. Raises PartDied."""
        return self._joined("weights")

    def save(self) -> dict[str, bytes]:
        """See `LearnerBackend.save`: the parts of all ranks. Raises PartDied."""
        return self._joined("save")

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned.

        Raises:
            ValueError: it is of other ranks, another stage or another model.
            PartDied: a rank is lost.
        """
        self._all("restore", dict(files))

    def close(self) -> None:
        """End the ranks."""
        self._ended = self._ended or "the learner was closed"
        self._ranks.end()

    def _joined(self, method: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for answer in self._all(method):
            files |= answer
        return files

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Every rank's answer."""
        if self._ended:
            raise PartDied(self._ended)
        asked = self._ranks.ask(method, *arguments)
        _, silent = wait(asked, self._deadline_s, FIRST_EXCEPTION)
        if silent and any(each.done() for each in asked):
            wait(asked, self._grace_s)
        errors = {rank: each.exception() for rank, each in enumerate(asked) if each.done()}
        raised = {rank: error for rank, error in errors.items() if error is not None}
        if len(errors) == len(asked) and not raised:
            return [each.result() for each in asked]
        if len(raised) == len(asked) and _is_alike(list(raised.values())):
            raise raised[0]
        self._ended = self._loss(method, len(asked), errors)
        self._ranks.end()
        raise PartDied(self._ended)

    def _loss(self, method: str, size: int, errors: Mapping[int, BaseException | None]) -> str:
        """Which rank is to blame: one that is gone, else one that says nothing, else the first that failed."""
        for rank, error in errors.items():
            if isinstance(error, PartDied):
                return f"learner rank {rank} died: {error}"
        if silent := [rank for rank in range(size) if rank not in errors]:
            return f"learner ranks {silent} gave no answer to {method!r} within {self._deadline_s:g} s"
        rank, error = next((rank, error) for rank, error in errors.items() if error is not None)
        return f"learner rank {rank} failed in {method!r}: {type(error).__name__}: {error}"


def _is_alike(errors: Sequence[BaseException]) -> bool:
    return all(
        isinstance(error, _ALIKE) and not isinstance(error, PartDied) and type(error) is type(errors[0])
        for error in errors
    )
