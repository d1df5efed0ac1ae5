"""Turns records of the metrics file into what scalar loggers take."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.platform.observability.names import Metric

_NAMES = frozenset(metric.value for metric in Metric) - {Metric.TIME_S.value}


def scalars(record: Mapping[Metric, Any]) -> dict[str, float]:
    """The finite numbers of a record: nested ones as `lag/0`, `fates/trained`; text, null and NaN are left out.

    The time is left out too, as every logger has its own field for it; so are names that the table does not have.
    """
    found = {}
    for name, value in _entries(record):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
    return found


def _entries(record: Mapping[Metric, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name not in _NAMES:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}/{label}", each) for label, each in value.items())
        else:
            yield str(name), value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain data under dotted names; lists stay whole unless they hold sections."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found
