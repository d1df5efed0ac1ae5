"""Credit and weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.platform.records.arrays import F32
from headrace.platform.records.episode import Episode
from headrace.platform.records.tables import RewardRow


class ScoredEpisode(msgspec.Struct, frozen=True, gc=False):
    """An episode with the scalar reward that its valid components add up to, and these components where an algorithm
    asks for more than their sum."""

    episode: Episode
    score: float
    rewards: tuple[RewardRow, ...] = ()


class AlgorithmNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an algorithm must be given besides episodes, scores and logprobs; each costs something, so nothing is made
    in vain. `rewards`: the reward rows of `ScoredEpisode`. `reference`: logprobs under the frozen weights that the run
    began with. `entropy`: that of the learner's distribution at each loss token. `values`: a
    critic's, of every state."""

    rewards: bool = False
    reference: bool = False
    entropy: bool = False
    values: bool = False


class Algorithm(Protocol):
    """Credit: from a group of scored episodes to one advantage per policy turn, and the loss that uses them."""

    name: str
    needs_variance: bool
    needs: AlgorithmNeeds

    def advantages(self, group: Sequence[ScoredEpisode]) -> Sequence[Sequence[float]]:
        """For each episode, one advantage per policy turn. Raises ValueError for unequal seeds in a group."""

    def loss(self, logprobs: Any, batch: Any) -> Any:
        """A scalar loss and its statistics, from learner logprobs and a batch (see trainer/batch.py)."""

    def observe(self, batch: Sequence[Sequence[ScoredEpisode]]) -> None:
        """Take note of the groups of a batch that was just trained; `advantages` must not change anything itself."""

    def state(self) -> Mapping[str, float]:
        """What `observe` has made, for a checkpoint; empty where it makes nothing."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what `state` returned."""


class LearnerBackend(Protocol):
    """Holds the trainable weights. Every rank makes the same calls in the same order."""

    def step(self, batch: Any, algorithm: Algorithm) -> Mapping[str, float]:
        """One optimizer step; returns statistics. Raises ArithmeticError for a loss that is not finite."""

    def logprobs(self, batch: Any) -> Sequence[F32]:
        """Logprobs of each sample's tokens under the present weights."""

    def weights(self) -> Mapping[str, bytes]:
        """The files of a Hugging Face folder that holds the present weights."""

    def save(self) -> Mapping[str, bytes]:
        """Everything a resume needs: weights, optimizer, random states."""

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned."""
