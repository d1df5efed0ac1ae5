"""Going on with a run that was interrupted or killed: what its root says of it, and what may be changed (P6).

Weights, optimizer, head and queue are restored by the learner and the ledger; here is the rest: the configuration, the
first measurement, the best version, and what the curriculum had learnt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.deploy.context import RunContext
from headrace.platform.config import RunConfig
from headrace.platform.config.load import config_from_text, dump_yaml
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.store.run_root import RunRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a run had come to before it is resumed. `before` is what was measured before the first learner step, None
    where the run was ended before that; `best` is as in `best.json`; `seconds` is how long it ran by its metrics."""

    before: tuple[float, float] | None = None
    best: Mapping[str, Any] | None = None
    seconds: float = 0.0


def open_run(runs_dir: str, prefix: str, overrides: Sequence[str]) -> tuple[RunContext, RunRoot]:
    """The run to go on with, its configuration with `overrides`, which is then the run's configuration.

    Raises:
        NotFound: there is no such run.
        ConfigError: it is finished, or the overrides are wrong.
    """
    root = RunRoot.find(runs_dir, prefix)
    config = config_from_text(root.read_config(), list(overrides), f"{root.name}/config.yaml")
    _check_unfinished(root, config)
    return RunContext(run=root.name, root=root.url, config=config), root


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


def take_up(context: RunContext, root: RunRoot) -> Past:
    """What to go on from; makes the configuration of `context` the run's. For whoever holds the run's lock."""
    root.write_config(dump_yaml(context.config))
    before, first_s, last_s = None, None, 0.0
    for record in _metrics(root):
        last_s = record.get(Metric.TIME_S, last_s)
        first_s = last_s if first_s is None else first_s
        if before is None and record.get(Metric.STAGE) == "eval" and record.get(Metric.LEARNER_STEP) == 0:
            before = (record[Metric.EVAL_SUCCESS], record[Metric.EVAL_SCORE])
    try:
        best = root.read_best()
    except NotFound:
        best = None
    return Past(before=before, best=best, seconds=last_s - first_s if first_s is not None else 0.0)


def _metrics(root: RunRoot) -> list[dict[str, Any]]:
    try:
        return list(read_metrics(root.metrics))
    except FileNotFoundError:
        return []
