"""Credit by a critic: a batch's advantages as they are once the states of its episodes have values.

Groups are opened one by one, long before the weights that will train on them are known; values are those of the
weights at the start of the batch. So an algorithm that has a critic credits twice: at the opening as if every value
were 0, and here for good. What is trained, and what receipts say, is the second. Owns the order: values of all tokens
of the batch, then advantages and the critic's targets, then the step.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.platform.contracts import Algorithm, ScoredEpisode
from headrace.platform.errors import ConfigError
from headrace.platform.records.arrays import F32
from headrace.trainer.intake import OpenedGroup
from headrace.trainer.samples import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Valued:
    """An episode with its samples, and for each of them values f32[T]: that of the state after each token."""

    scored: ScoredEpisode
    samples: tuple[Sample, ...]
    values: tuple[F32, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Credited:
    """What an algorithm makes of `Valued`: one advantage per policy turn, and the samples with advantages per token
    and with the columns of the critic."""

    advantages: tuple[float, ...]
    samples: tuple[Sample, ...]


@runtime_checkable
class CreditsByValue(Protocol):
    """An algorithm that needs values (`AlgorithmNeeds.values`)."""

    def credit(self, batch: Sequence[Valued]) -> Sequence[Credited]:
        """One for each episode of the batch, in its order. A function: changes nothing."""


@runtime_checkable
class HoldsCritic(Protocol):
    """A backend that has a critic beside its policy."""

    def values(self, batch: Sequence[Sample]) -> Sequence[F32]:
        """For each sample values f32[T] under the present weights: of the state after each token."""


def credited(backend: Any, algorithm: Algorithm, opened: Sequence[OpenedGroup]) -> list[OpenedGroup]:
    """The same groups, credited by value where the algorithm asks for it.

    Members without a token within the lag limit teach nobody anything here: no one is compared with them.

    Raises:
        ConfigError: the backend holds no critic.
    """
    if not algorithm.needs.values:
        return list(opened)
    if not isinstance(algorithm, CreditsByValue) or not isinstance(backend, HoldsCritic):
        raise ConfigError(
            f"learner.algorithm.name={algorithm.name} needs a critic, which this learner's backend does not hold; use"
            " learner.backend=torch"
        )
    members = [member for group in opened for member in group.members if member.live]
    values = iter(backend.values([sample for member in members for sample in member.samples]))
    batch = [
        Valued(scored=one.scored, samples=one.samples, values=tuple(next(values) for _ in one.samples))
        for one in members
    ]
    found = iter(algorithm.credit(batch))
    return [
        dataclasses.replace(group, members=tuple(_with(one, next(found)) if one.live else one for one in group.members))
        for group in opened
    ]


def _with(member: Any, credit: Credited) -> Any:
    return dataclasses.replace(member, advantages=credit.advantages, samples=credit.samples)
