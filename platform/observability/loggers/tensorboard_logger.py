"""TensorBoard event files in `logs/tensorboard` of the run root.

They are written with the package's own `EventFileWriter`, which `torch.utils.tensorboard` wraps as well: the same files
without loading torch, and one event for a whole record. Values are 32-bit floats: the format has no others.
Each supervised stage counts its steps from the start, so stages overlap on the step axis; the axis of time tells them
apart.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from headrace.platform.config.loggers import TensorboardConfig
from headrace.platform.config.secret_references import SecretValues
from headrace.platform.observability.loggers.contract import Point
from headrace.platform.observability.loggers.packages import load


class TensorboardLogger:
    """See `RunLogger`."""

    def __init__(self, config: TensorboardConfig, secrets: SecretValues) -> None:
        self._writer: Any = None
        self._event: Any = None
        self._summary: Any = None

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """See `RunLogger.start`. The configuration appears under TEXT."""
        self._event = load("tensorboard.compat.proto.event_pb2").Event
        self._summary = load("tensorboard.compat.proto.summary_pb2").Summary
        text_pb = load("tensorboard.plugins.text.summary_v2").text_pb
        writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(str(Path(root) / "logs" / "tensorboard"), flush_secs=10)
        code_block = indent(json.dumps(config, indent=2, default=str), " " * 4)
        self._writer.add_event(self._event(wall_time=time.time(), step=0, summary=text_pb("config", code_block)))

    def log(self, point: Point) -> None:
        """See `RunLogger.log`."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._writer.add_event(
            self._event(wall_time=point.time_s, step=point.step, summary=self._summary(value=values))
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `RunLogger.finish`."""
        self._writer.close()
