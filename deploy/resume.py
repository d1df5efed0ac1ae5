"""Going on with a run that was interrupted or killed: what its root says of it, and what may be changed (P6).

Weights, optimizer, head and queue are restored by the learner and the ledger; here is the rest: the configuration, the
first measurement, the best version, and what the run had added up. Nothing is written here: a resume that is refused
leaves the run as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.deploy.context import RunContext
from headrace.platform.config import LearnerConfig, RunConfig
from headrace.platform.config.load import config_from_text
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.store.run_root import RunRoot

_LONGEST_PAUSE_S = 60.0
"""Between two records of a run that goes on; what lies further apart lay between a death and a resume."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a run had come to before it is resumed. `before` is what was measured before the first learner step, None
    where the run was ended before that; `best` is as in `best.json`; `seconds` is how long it ran, and `bubble_s` how
    long its learner had waited."""

    before: tuple[float, float] | None = None
    best: Mapping[str, Any] | None = None
    seconds: float = 0.0
    bubble_s: float = 0.0


def open_run(runs_dir: str, prefix: str, overrides: Sequence[str]) -> tuple[RunContext, RunRoot]:
    """The run to go on with, its configuration with `overrides`.

    Raises:
        NotFound: there is no such run.
        ConfigError: it is finished, or the overrides are wrong, or they change what the queue was filled under, or
            what its checkpoints are of.
    """
    root = RunRoot.find(runs_dir, prefix)
    name = f"{root.name}/config.yaml"
    text = root.read_config()
    before = RunContext(run=root.name, root=root.url, config=config_from_text(text, [], name))
    context = replace(before, config=config_from_text(text, list(overrides), name))
    _check_limits(before, context)
    check_ranks(before.config.learner, context.config.learner)
    _check_unfinished(root, context.config)
    return context, root


def _check_limits(before: RunContext, after: RunContext) -> None:
    """Refuse limits under which what was trained, or is queued, would be judged anew (P5, P14)."""
    old, new = (
        msgspec.structs.asdict(each.limits) | {"group_size": each.config.learner.algorithm.group_size}
        for each in (before, after)
    )
    if changed := [f"{name} from {old[name]} to {new[name]}" for name in old if old[name] != new[name]]:
        raise ConfigError(
            f"a resumed run keeps the limits of its queue, as it was trained and filled under them; you change"
            f" {', '.join(changed)}. Leave that out, or start a new run"
        )


def check_ranks(before: LearnerConfig, after: LearnerConfig) -> None:
    """Refuse a learner that cannot take up the checkpoints of the one before (P13). Raises ConfigError."""

    def kept(config: LearnerConfig) -> dict[str, Any]:
        shared = config.deepspeed
        parts = {"deepspeed.stage": shared.stage, "deepspeed.offload_optimizer": shared.offload_optimizer}
        lora = {f"lora.{name}": value for name, value in config.lora.model_dump().items()}
        return {
            "backend": config.backend,
            "ranks": config.ranks,
            **(parts if config.backend == "deepspeed" else {}),
            **(lora if before.lora.rank or after.lora.rank else {}),
        }

    old, new = kept(before), kept(after)
    if changed := [f"learner.{name} from {old[name]} to {new.get(name)}" for name in old if old[name] != new.get(name)]:
        raise ConfigError(
            f"a resumed run keeps the backend, ranks, ZeRO stage and adapters that its checkpoints are of; you change"
            f" {', '.join(changed)}. Leave that out, or start a new run"
        )


def _check_unfinished(root: RunRoot, config: RunConfig) -> None:
    try:
        summary = root.read_summary()
    except NotFound:
        return
    steps = summary.get("learner_steps", 0)
    if "failed" not in summary and steps >= config.learner.steps:
        raise ConfigError(
            f"the run {root.name} is finished: {steps} of learner.steps={config.learner.steps} are done."
            f" To train it further, resume it with learner.steps={2 * steps}"
        )


def take_up(root: RunRoot) -> Past:
    """What to go on from. For whoever holds the run's lock."""
    before, seconds, bubble_s, last_s = None, 0.0, 0.0, None
    for record in _metrics(root):
        now_s = record.get(Metric.TIME_S)
        if now_s is not None and last_s is not None:
            seconds += min(max(now_s - last_s, 0.0), _LONGEST_PAUSE_S)
        last_s = now_s
        bubble_s = record.get(Metric.BUBBLE_S) or bubble_s
        if before is None and record.get(Metric.STAGE) == "eval" and record.get(Metric.LEARNER_STEP) == 0:
            before = (record[Metric.EVAL_SUCCESS], record[Metric.EVAL_SCORE])
    try:
        best = root.read_best()
    except NotFound:
        best = None
    return Past(before=before, best=best, seconds=seconds, bubble_s=bubble_s)


def _metrics(root: RunRoot) -> list[dict[str, Any]]:
    try:
        return list(read_metrics(root.metrics))
    except FileNotFoundError:
        return []
