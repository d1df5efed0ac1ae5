"""Where the metrics of a run go: `metrics.jsonl` always, and W&B, TensorBoard or MLflow beside it.

`contract.py` is the small interface of one logger, `fan_out.py` what a run writes to, `registry.py` names the kinds.
"""

from headrace.platform.observability.loggers.contract import Point, RunLogger
from headrace.platform.observability.loggers.fan_out import Loggers
from headrace.platform.observability.loggers.registry import build_loggers, check_loggers

__all__ = ["Loggers", "Point", "RunLogger", "build_loggers", "check_loggers"]
