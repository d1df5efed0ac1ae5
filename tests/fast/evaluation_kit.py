"""Outcomes and evaluations to start a test from."""

from headrace.platform.evaluation.record import evaluation_of
from headrace.platform.records import FaultOwner, Status
from headrace.platform.records.evaluation import EpisodeOutcome


def outcome(task, score=1.0, *, seed=7, sample=0, environment="counter", **fields):
    values = {
        "episode_id": f"run.e0.{sample}.0",
        "status": Status.OK,
        "fault_owner": FaultOwner.NONE,
        "turns": 2,
        "sampled_tokens": 10,
        "duration_s": 1.0,
        "tool_s": 0.0,
    }
    return EpisodeOutcome(
        environment=environment, task_id=task, seed=seed, sample=sample, score=score, **{**values, **fields}
    )


def evaluation(outcomes, *, samples=1, **fields):
    values = {"name": "v000003-dev-01", "run": "run", "model": "run", "version": 3, "split": "dev", "tasks": 4}
    values |= {"created_at_s": 5.0, "digests": {}}
    return evaluation_of(outcomes, samples=samples, **{**values, **fields})


def trials(task, pattern, **fields):
    """A task's samples: `1` for a success, `0` for a failure, `-` for one without a score."""
    scores = {"1": 1.0, "0": 0.0, "-": None}
    return [outcome(task, scores[each], sample=sample, **fields) for sample, each in enumerate(pattern)]
