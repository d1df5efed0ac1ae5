"""An algorithm and a backend small enough to work out by hand: one weight, no tensors.

The model is that every token has the logprob `weight`, whatever it is. With the loss -sum(advantage * logprob) / n
over n loss tokens, the gradient is -sum(advantage) / n, and a step subtracts `lr` times it. Samples are anything with
the attributes of `FakeSample`, so the learner's own samples will do.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from headrace.platform.contracts import Algorithm, AlgorithmNeeds, ScoredEpisode
from headrace.platform.records.arrays import F32, I32, U8


class FakeSample(Protocol):
    """What `FakeBackend` reads of a sample: three arrays of one length, and whose it is."""

    @property
    def episode_id(self) -> str:
        """For error messages."""

    @property
    def token_ids(self) -> I32:
        """Token ids."""

    @property
    def loss_mask(self) -> U8:
        """1 on the tokens that enter the loss."""

    @property
    def advantages(self) -> F32:
        """Meaningful where the loss mask is 1."""


class FakeAlgorithm:
    """Advantage: score minus the group's mean. Loss: policy gradient, in plain floats. `seen` counts the episodes that
    it was told of."""

    name = "fake"
    needs_variance = True
    needs = AlgorithmNeeds()

    def __init__(self) -> None:
        self.seen = 0

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """See `Algorithm.advantages`."""
        if len({(one.episode.task.task_id, one.episode.task.seed, one.episode.seed) for one in group}) != 1:
            raise ValueError("the members of a group must share task, task seed and environment seed")
        mean = sum(one.score for one in group) / len(group)
        return [[one.score - mean] * sum(turn.is_action for turn in one.episode.turns) for one in group]

    def loss(self, logprobs: Sequence[F32], batch: Sequence[FakeSample]) -> float:
        """-sum(advantage * logprob) / n over the loss tokens of `batch`."""
        total, tokens = 0.0, 0
        for row, sample in zip(logprobs, batch, strict=True):
            chosen = sample.loss_mask == 1
            total -= float((sample.advantages[chosen].astype(np.float64) * row[chosen]).sum())
            tokens += int(chosen.sum())
        return total / tokens

    def observe(self, batch: Sequence[Sequence[ScoredEpisode]]) -> None:
        """See `Algorithm.observe`."""
        self.seen += sum(map(len, batch))

    def state(self) -> dict[str, float]:
        """See `Algorithm.state`."""
        return {"seen": float(self.seen)}

    def restore(self, state: Mapping[str, float]) -> None:
        """See `Algorithm.restore`."""
        self.seen = int(state["seen"])


class FakeBackend:
    """One weight. `calls` lists the episode ids of every step, in order."""

    def __init__(self, weight: float = -1.0, lr: float = 0.1) -> None:
        self.weight = weight
        self.calls: list[list[str]] = []
        self._lr = lr
        self._steps = 0

    def step(self, batch: Sequence[FakeSample], algorithm: Algorithm) -> Mapping[str, float]:
        """See `LearnerBackend.step`."""
        self.calls.append([sample.episode_id for sample in batch])
        tokens = sum(int(sample.loss_mask.sum()) for sample in batch)
        if tokens == 0:
            raise ValueError("no token of this batch enters the loss")
        loss = float(algorithm.loss(self.logprobs(batch), batch))
        if not math.isfinite(loss):
            bad = sorted(s.episode_id for s in batch if not np.isfinite(s.advantages[s.loss_mask == 1]).all())
            raise ArithmeticError(f"the loss is not finite; episodes {', '.join(bad)}")
        gradient = -sum(float(s.advantages[s.loss_mask == 1].sum(dtype=np.float64)) for s in batch) / tokens
        self.weight -= self._lr * gradient
        self._steps += 1
        return {"loss": loss, "loss_tokens": float(tokens), "grad_norm": abs(gradient)}

    def logprobs(self, batch: Sequence[FakeSample]) -> list[F32]:
        """See `LearnerBackend.logprobs`."""
        return [np.full(len(sample.token_ids), self.weight, np.float32) for sample in batch]

    def weights(self) -> dict[str, bytes]:
        """See `LearnerBackend.weights`."""
        return {
            "config.json": json.dumps({"model_type": "fake"}).encode(),
            "model.safetensors": np.float64(self.weight).tobytes(),
        }

    def save(self) -> dict[str, bytes]:
        """See `LearnerBackend.save`."""
        return {**self.weights(), "state.json": json.dumps({"steps": self._steps}).encode()}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """See `LearnerBackend.restore`."""
        steps = int(json.loads(files["state.json"])["steps"])
        self.weight = float(np.frombuffer(files["model.safetensors"], np.float64)[0])
        self._steps = steps
