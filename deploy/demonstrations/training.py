"""One supervised stage over demonstrations: training, its held-out loss, and the report of both."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from headrace.deploy.demonstrations.gathering import Demonstrations
from headrace.platform.config import SftStageConfig
from headrace.trainer.sft import SftProgress, mean_loss, run_stage


def longest_trace(model: Any, max_tokens: int) -> int:
    """How long a trace may be: `max_tokens`, or what the model has positions for, where that is less."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(max_tokens, int(positions)) if positions else max_tokens


def train_stage(
    model: Any,
    stage: SftStageConfig,
    shown: Demonstrations,
    measure: Callable[[], float] | None,
    on_progress: Callable[[SftProgress], None],
) -> dict[str, Any]:
    """Train `model` in place (see `run_stage`); a JSON-safe report.

    It holds stage, steps, loss and success as `SftResult` does, `seconds`, `traces` with the counts of
    `Demonstrations`, and `loss_before` and `loss_after` on what was held out, None where nothing was.
    """

    began = time.monotonic()
    before = mean_loss(model, shown.held_out) if shown.held_out else None
    result = run_stage(model, stage, shown.traces, measure, on_progress)
    after = mean_loss(model, shown.held_out) if shown.held_out else None
    return {
        **asdict(result),
        "loss_before": before,
        "loss_after": after,
        "traces": shown.counts,
        "seconds": time.monotonic() - began,
    }
