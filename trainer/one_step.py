"""One optimizer step on opened groups, and the state that it starts from: the learner's, and a replay's alike.

Owns the order: the loss is taken first, then the algorithm takes note of the batch, once (its running figures are of
batches before). Leases, versions and fates are the learner's business.
"""

from collections.abc import Mapping, Sequence

import msgspec

from headrace.platform.contracts import Algorithm, LearnerBackend
from headrace.trainer.crediting import credited
from headrace.trainer.intake import OpenedGroup
from headrace.trainer.samples import Sample

ALGORITHM_FILE = "algorithm.json"
"""The algorithm's part of a checkpoint; those of earlier builds have none."""


def samples_of(opened: Sequence[OpenedGroup]) -> list[Sample]:
    """What the loss sees of a batch, in the order of its groups: the samples that have a loss token."""
    members = [member for group in opened for member in group.members]
    return [sample for member in members for sample in member.samples if sample.loss_tokens]


def take_step(backend: LearnerBackend, algorithm: Algorithm, opened: Sequence[OpenedGroup]) -> Mapping[str, float]:
    """Train on a batch; the step's figures.

    Raises:
        ArithmeticError: the loss or its gradient is not finite; nothing has changed.
    """
    statistics = backend.step(samples_of(credited(backend, algorithm, opened)), algorithm)
    algorithm.observe([[member.scored for member in group.members] for group in opened])
    return statistics


def restore_step(backend: LearnerBackend, algorithm: Algorithm, files: Mapping[str, bytes]) -> None:
    """Take up the weights, the optimizer and the algorithm's figures of a checkpoint.

    Raises:
        ValueError: its weights are those of another model.
        KeyError: a part is missing.
    """
    algorithm.restore(msgspec.json.decode(files.get(ALGORITHM_FILE, b"{}"), type=dict[str, float]))
    backend.restore(files)


def saved_step(backend: LearnerBackend, algorithm: Algorithm) -> dict[str, bytes]:
    """The parts of a checkpoint: what `restore_step` takes up."""
    return {**backend.save(), ALGORITHM_FILE: msgspec.json.encode(algorithm.state())}
