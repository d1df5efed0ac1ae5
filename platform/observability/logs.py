"""Log files: plain lines of `time level logger message key=value …`, without secrets.

One event is one line; only a traceback takes more. Every resolved secret is taken out of the finished text, tracebacks
included (docs/design.md section 6.10).
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.platform.config.secret_references import SecretValues

ROOT_LOGGER = "headrace"


class _PlainFormatter(logging.Formatter):
    """Formats a record, its `fields`, and takes secrets out."""

    converter = staticmethod(time.gmtime)

    def __init__(self, secrets: SecretValues) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self._secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line = super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())
        return line.replace("\r", "\\r").replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return self._secrets.redact(super().format(record))


def open_log(folder: str | Path, name: str, secrets: SecretValues, level: int = logging.INFO) -> logging.Handler:
    """Send what headrace logs in this process to `FOLDER/NAME.log`, which is added to.

    Fields are passed as `extra={"fields": {"group": 3}}`. `secrets` may grow later. Returns the handler, for
    `close_log`.
    """
    path = Path(folder) / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_PlainFormatter(secrets))
    logger = logging.getLogger(ROOT_LOGGER)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler


def close_log(handler: logging.Handler) -> None:
    """Stop and close what `open_log` returned."""
    logging.getLogger(ROOT_LOGGER).removeHandler(handler)
    handler.close()
