"""`headrace sensitivity`: a stored batch scored under each off-policy correction, at the weights of that time.

The learner is brought to where it stood before the step, as a replay brings it there; then the batch is opened and
scored (`trainer/sensitivity.py`), and the step is not taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.deploy.stored_learner import open_learner
from headrace.platform.store.run_root import RunRoot
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.crediting import credited
from headrace.trainer.one_step import samples_of
from headrace.trainer.sensitivity import Correction, sensitivity


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The batch of `step`, at the weights that `steps_taken` steps after version `begun_at` had; what each correction
    makes of it."""

    step: int
    begun_at: int
    steps_taken: int
    groups: int
    corrections: Sequence[Correction]


async def step_sensitivity(root: RunRoot, step: int | None, begin: int | None = None) -> Sensitivity:
    """Score the batch of learner step `step`.

    Args:
        root: the run; nothing of it is changed.
        step: from 1; None for the last one that was published.
        begin: the version whose checkpoint to begin at; None for the newest before the step.

    Raises:
        NotFound: there is no such step, checkpoint or episode, or an episode is not what was trained on.
        ConfigError: the run's backend is not one that is replayed, or `begin` is not before the step.
    """
    learner = await open_learner(root, step, begin)
    step = learner.step
    before = [recorded for recorded in learner.steps if recorded.step < step]
    for recorded in before:
        await learner.replay.take(recorded)
    wanted = next(recorded for recorded in learner.steps if recorded.step == step)
    opened = credited(learner.backend, learner.algorithm, await learner.replay.open(wanted))
    backend, config = learner.backend, learner.config.learner
    assert isinstance(backend, TorchBackend)  # open_learner has refused all others
    return Sensitivity(
        step=step,
        begun_at=learner.checkpoint,
        steps_taken=len(before),
        groups=len(opened),
        corrections=sensitivity(backend.model, samples_of(opened), config.algorithm, config),
    )
