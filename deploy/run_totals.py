"""What a run adds up to: the figures of its summary and of each step's metrics."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.actors.outcomes import EnvironmentCounts
from headrace.deploy.progress import RunState
from headrace.deploy.runtime import Activity
from headrace.platform.errors import RunFailed
from headrace.platform.evaluation.lengths import length_deciles
from headrace.platform.observability.names import Metric
from headrace.platform.records.delivery import LedgerStats
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.permissions import Safety
from headrace.trainer.report import TERMS, StepReport

FEWEST_VALID = 0.5
"""Share of evaluation episodes that must have a valid reward for their mean to say something."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """What the summary adds up.

    `scores`, `tokens` and `environments` are the counters as last read, at `at_s`; `gap_alarms` count by replica
    (case S10), and `off_policy_warnings` steps whose importance weights were about to explode; `lags` is the ledger's
    histogram of what was trained, which survives every process of the run.
    """

    lags: Counter[int] = field(default_factory=Counter)
    bubble_s: float = 0.0
    length_bias: bool = False
    busy_s: float = 0.0
    overlapped_s: float = 0.0
    gap_alarms: Counter[str] = field(default_factory=Counter)
    off_policy_warnings: int = 0
    steps: int = 0
    version: int = 0
    scores: tuple[float, int] = (0.0, 0)
    tokens: int = 0
    environments: dict[str, EnvironmentCounts] = field(default_factory=dict)
    at_s: float = field(default_factory=time.time)

    def warned(self, report: StepReport) -> list[str]:
        """Count what a step warns of; what the user should read now: the first of each kind."""
        notes = []
        for alarm in report.alarms:
            self.gap_alarms[alarm.replica] += 1
            if self.gap_alarms[alarm.replica] == 1:
                notes.append(f"ALARM: {alarm}")
        if report.off_policy is not None and report.off_policy.warning:
            self.off_policy_warnings += 1
            if self.off_policy_warnings == 1:
                notes.append(f"step {report.step}: {report.off_policy.warning}; later ones are in the learner's log")
        return notes

    @property
    def lag_share_ge1(self) -> float:
        """Share of trained episodes with a lag of one or more."""
        trained = sum(self.lags.values())
        return sum(n for lag, n in self.lags.items() if lag >= 1) / trained if trained else 0.0


def check_scored(outcomes: Sequence[EpisodeOutcome]) -> None:
    """Refuse to call the mean of a few a measurement.

    Raises:
        RunFailed: fewer than half of the episodes say something about the policy.
    """
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    if len(scores) < FEWEST_VALID * len(outcomes):
        fault = next((outcome.fault for outcome in outcomes if outcome.fault), "none was recorded")
        raise RunFailed(
            f"only {len(scores)} of {len(outcomes)} evaluation episodes gave a valid reward; the first fault: {fault}"
        )


def fate_totals(stats: LedgerStats) -> dict[str, int]:
    """The six totals of the equation, and every reason under its own name."""
    totals = {"dispatched": stats.dispatched}
    for kind in ("trained", "dropped", "failed", "cancelled", "in_flight"):
        totals[kind] = sum(n for fate, n in stats.fates.items() if fate.split(":")[0] == kind)
    return totals | {fate: n for fate, n in sorted(stats.fates.items()) if ":" in fate}


def discarded(ended: Mapping[str, float]) -> dict[str, float]:
    """What was not trained, as a share of all that has ended, by fate and reason and in total.

    Args:
        ended: attempts or slot-seconds by fate, as in `LedgerStats`; what is in flight has not ended.
    """
    counts = {fate: n for fate, n in ended.items() if fate != "in_flight"}
    total = sum(counts.values())
    lost = {fate: round(n / total, 6) for fate, n in sorted(counts.items()) if n and fate != "trained"} if total else {}
    return lost | {"total": round(sum(lost.values()), 6)}


def trained_by_length(stats: LedgerStats) -> dict[str, float]:
    """Share of ended attempts that were trained, by decile of their time in play; "d1" are the shortest (P16)."""
    return {f"d{n}": round(each.share, 4) for n, each in enumerate(length_deciles(stats.lengths), start=1)}


def total_safety(environments: Mapping[str, EnvironmentCounts]) -> Safety:
    """What the gateway counted over all environments."""
    return sum((counts.safety for counts in environments.values()), Safety())


def safety_metrics(safety: Safety) -> dict[Metric, Any]:
    """The gateway's counts since the start."""
    return {
        Metric.CALLS: safety.calls,
        Metric.VIOLATIONS: safety.violations,
        Metric.BLOCKED: dict(sorted(safety.blocked.items())),
        Metric.EXFILTRATION: safety.exfiltration,
        Metric.DUPLICATES: safety.duplicates,
        Metric.PLANTED: safety.planted,
        Metric.OBEDIENCE: safety.obedience if safety.obedience is not None else float("nan"),
        Metric.PLANTED_EFFECTS: safety.effects,
    }


def off_policy_metrics(report: StepReport) -> dict[Metric, Any]:
    """How far tokens were off policy, by lag and by length, and what the loss has besides."""
    buckets = {f"lag {lag}": found for lag, found in report.by_lag.items()}
    buckets |= {f"to {most} tokens": found for most, found in report.by_length.items()}
    return {
        Metric.RATIO_BY: {name: found.ratio_mean for name, found in buckets.items()},
        Metric.KL_BY: {name: found.kl for name, found in buckets.items()},
        Metric.CLIP_SHARE_BY: {name: found.clip_share for name, found in buckets.items()},
        Metric.ESS_TOKENS: {name: found.token_share for name, found in buckets.items()},
        Metric.ESS_SEQUENCES: {name: found.sequence_share for name, found in buckets.items()},
        **{metric: report.terms.get(metric, float("nan")) for metric in Metric if metric in TERMS},
    }


def step_metrics(
    report: StepReport,
    stats: LedgerStats,
    activity: Activity,
    state: RunState,
    totals: Totals,
    restarts: Mapping[str, int],
) -> dict[Metric, Any]:
    """The record of one learner step."""
    return {
        Metric.STAGE: "rl",
        Metric.LEARNER_STEP: report.step,
        Metric.POLICY_VERSION: report.version,
        Metric.LOSS: report.loss,
        Metric.KL: report.kl,
        Metric.LOGPROB_GAP: {f"{gap.replica}@{gap.version}": gap.mean for gap in report.gaps},
        Metric.GAP_ALARMS: dict(totals.gap_alarms),
        Metric.CLIP_SHARE: report.clip_share,
        **off_policy_metrics(report),
        Metric.LEARNING_RATE: report.lr,
        Metric.GRAD_NORM: report.grad_norm,
        Metric.LOSS_TOKENS: report.loss_tokens,
        Metric.GROUPS_TRAINED: report.groups,
        Metric.EPISODES_TRAINED: report.episodes,
        Metric.LEARNER_BUSY_S: report.busy_s,
        Metric.LEARNER_WAIT_S: report.wait_s,
        Metric.HELD_S: report.held_s,
        Metric.BUBBLE_S: totals.bubble_s,
        Metric.SCORE_MEAN: report.score_mean,
        Metric.LAG: {str(lag): n for lag, n in report.lags.items()},
        Metric.LAG_MAX_TRAINED: max(totals.lags, default=0),
        Metric.LAG_SHARE_GE1: totals.lag_share_ge1,
        Metric.SUCCESS: state.success if state.success is not None else float("nan"),
        Metric.SUCCESS_BY_ENVIRONMENT: _lately(activity.environments, totals.environments),
        Metric.EPISODES_BY_ENVIRONMENT: {name: counts.episodes for name, counts in activity.environments.items()},
        Metric.FAULTS_BY_ENVIRONMENT: {
            name: sum(counts.faults.values()) for name, counts in activity.environments.items()
        },
        Metric.SANDBOX_DIED: {name: counts.sandbox_died for name, counts in activity.environments.items()},
        **safety_metrics(total_safety(activity.environments)),
        Metric.SEGMENTS_OPENED: sum(counts.segments_opened for counts in activity.environments.values()),
        Metric.EPISODES_PER_S: state.episodes_per_s,
        Metric.TOKENS_PER_S: state.tokens_per_s,
        Metric.EPISODES_RUNNING: activity.episodes_running,
        Metric.REPLICAS: activity.replicas,
        Metric.REQUESTS_RUNNING: activity.requests_running,
        Metric.LOADED_VERSION: activity.loaded_version,
        Metric.LOAD_FAILURES: activity.load_failures,
        Metric.ROLLED_S: activity.rolled_s,
        Metric.RETRIED: activity.retried,
        Metric.RESAMPLED: activity.resampled,
        Metric.DISPATCHED: stats.dispatched,
        Metric.FATES: stats.fates,
        Metric.DISCARDED: discarded(stats.fates),
        Metric.DISCARDED_TIME: discarded(stats.slot_seconds),
        Metric.TRAINED_BY_LENGTH: trained_by_length(stats),
        Metric.LENGTH_BIAS: int(totals.length_bias),
        Metric.PUTS_REFUSED: stats.refused,
        Metric.GROUPS_OPEN: stats.groups_open,
        Metric.GROUPS_READY: stats.groups_ready,
        Metric.GROUPS_LEASED: stats.groups_leased,
        Metric.QUEUE_BYTES: stats.payload_bytes,
        Metric.RESTARTS: dict(restarts),
        Metric.LEDGER_EPOCH: stats.epoch,
        Metric.OVERLAP: totals.overlapped_s / totals.busy_s if totals.busy_s else 0.0,
    }


def _lately(now: Mapping[str, EnvironmentCounts], before: Mapping[str, EnvironmentCounts]) -> dict[str, float]:
    """Mean score by environment of what was played since `before`; environments that played nothing are left out."""
    means = {}
    for name, counts in now.items():
        earlier = before.get(name)
        scored = counts.scored - (earlier.scored if earlier else 0)
        if scored > 0:
            means[name] = (counts.score_sum - (earlier.score_sum if earlier else 0.0)) / scored
    return means
