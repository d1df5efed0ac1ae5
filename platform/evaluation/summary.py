"""What an evaluation says about a policy: the one summary for the command line and for evaluation while training.

An episode without a valid score says nothing about the policy: it is left out of every share and counted apart (cases
E1 and E15). A task is (environment, task id) where intervals are concerned; the samples of one task under one seed are
its trials where pass@k and pass^k are.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import comb

import msgspec
import numpy as np

from headrace.platform.evaluation.interval import Interval, bootstrap
from headrace.platform.records.evaluation import EpisodeOutcome, Evaluation
from headrace.platform.records.permissions import UNSAID, Safety
from headrace.platform.records.status import FaultOwner

_SUCCESS_AT = 1.0 - 1e-9  # a sum of components may miss 1 by rounding


class Percentiles(msgspec.Struct, frozen=True):
    """P50 and P99 of durations, in seconds."""

    p50_s: float
    p99_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of some episodes. What was not measured is None, or absent from a map, never 0.

    `success` is the share of scored episodes whose score is 1 or more, `mean_score` their mean score. `pass_at[k]` is
    the chance that one of k trials succeeds, `pass_hat[k]` (pass^k) that all k do, both meaned over tasks with at least
    k scored trials. `tool_s` is the time in tools per episode, over episodes that used one. `errors` counts episodes by
    fault owner, `statuses` by status; `fault` is the first one. `struck` counts episodes into which a fault was put on
    purpose, and `recovery` is the mean score of those that went on to a score: how well the policy copes. `safety` is
    what the gateway counted, over all of them.
    """

    tasks: int
    episodes: int
    scored: int
    success: Interval | None
    mean_score: Interval | None
    pass_at: dict[int, float]
    pass_hat: dict[int, float]
    episode_s: Percentiles | None
    tool_s: Percentiles | None
    turns: float | None
    sampled_tokens: float | None
    errors: dict[str, int]
    statuses: dict[str, int]
    fault: str = ""
    struck: int = 0
    recovery: Interval | None = None
    safety: Safety = UNSAID

    @property
    def unscored(self) -> int:
        """Episodes that say nothing about the policy."""
        return self.episodes - self.scored


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all episodes, and of each environment's."""

    overall: Figures
    environments: dict[str, Figures]


def summarize(evaluation: Evaluation, seed: int = 0) -> EvaluationSummary:
    """The summary of an evaluation; `seed` decides the resampling of the bootstrap and nothing else."""
    by_environment: dict[str, list[EpisodeOutcome]] = defaultdict(list)
    for outcome in evaluation.outcomes:
        by_environment[outcome.environment].append(outcome)
    return EvaluationSummary(
        overall=_figures(evaluation.outcomes, evaluation.samples, seed),
        environments={
            name: _figures(outcomes, evaluation.samples, seed) for name, outcomes in sorted(by_environment.items())
        },
    )


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """The chance that at least one of k trials of a task succeeds, unbiased, from `successes` of `trials`.

    Chen et al., Evaluating Large Language Models Trained on Code, 2021, equation 1. Raises ValueError for k > trials.
    """
    _check_k(trials, successes, k)
    return 1.0 - comb(trials - successes, k) / comb(trials, k)


def pass_hat_k(trials: int, successes: int, k: int) -> float:
    """pass^k: the chance that all of k trials of a task succeed, unbiased, from `successes` of `trials`.

    Yao et al., tau-bench, 2024, section 4. Raises ValueError for k > trials.
    """
    _check_k(trials, successes, k)
    return comb(successes, k) / comb(trials, k)


def is_success(score: float) -> bool:
    """Whether a score counts as success."""
    return score >= _SUCCESS_AT


def _check_k(trials: int, successes: int, k: int) -> None:
    if not (1 <= k <= trials and 0 <= successes <= trials):
        raise ValueError(f"{k} of {trials} trials with {successes} successes: need 1 <= k <= trials")


def _figures(outcomes: Sequence[EpisodeOutcome], samples: int, seed: int) -> Figures:
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    trials: dict[tuple[str, str, int], list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.score is not None:
            scores[outcome.environment, outcome.task_id].append(outcome.score)
            trials[outcome.environment, outcome.task_id, outcome.seed].append(is_success(outcome.score))
    recovered: dict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.injected_faults and outcome.score is not None:
            recovered[outcome.environment, outcome.task_id].append(outcome.score)
    clusters = list(scores.values())
    successes = [[float(is_success(score)) for score in cluster] for cluster in clusters]
    counts = [(len(each), sum(each)) for each in trials.values()]
    return Figures(
        tasks=len({(outcome.environment, outcome.task_id) for outcome in outcomes}),
        episodes=len(outcomes),
        scored=sum(map(len, clusters)),
        success=bootstrap(successes, seed) if clusters else None,
        mean_score=bootstrap(clusters, seed) if clusters else None,
        pass_at=_over_tasks(pass_at_k, counts, samples),
        pass_hat=_over_tasks(pass_hat_k, counts, samples),
        episode_s=_percentiles([outcome.duration_s for outcome in outcomes]),
        tool_s=_percentiles([outcome.tool_s for outcome in outcomes if outcome.tool_s > 0]),
        turns=_mean([outcome.turns for outcome in outcomes]),
        sampled_tokens=_mean([outcome.sampled_tokens for outcome in outcomes]),
        errors=_counted([each.fault_owner for each in outcomes if each.fault_owner is not FaultOwner.NONE]),
        statuses=_counted([outcome.status for outcome in outcomes]),
        fault=next((outcome.fault for outcome in outcomes if outcome.fault), ""),
        struck=sum(outcome.injected_faults > 0 for outcome in outcomes),
        recovery=bootstrap(list(recovered.values()), seed) if recovered else None,
        safety=sum((outcome.safety for outcome in outcomes), Safety()),
    )


def _over_tasks(
    estimator: Callable[[int, int, int], float], counts: Sequence[tuple[int, int]], most: int
) -> dict[int, float]:
    """The mean of an estimator over tasks with enough trials, for every k up to `most` for which there are any."""
    means: dict[int, float] = {}
    for k in range(1, most + 1):
        values = [estimator(trials, successes, k) for trials, successes in counts if trials >= k]
        if values:
            means[k] = sum(values) / len(values)
    return means


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, [50, 99])
    return Percentiles(float(p50), float(p99))


def _counted(codes: Sequence[str]) -> dict[str, int]:
    return {str(code): count for code, count in sorted(Counter(codes).items())}
