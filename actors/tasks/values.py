"""Values of rows as JSON has them: what comes from numpy, Arrow or Python is made plain, or refused by name."""

import datetime
import math
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import numpy as np

_INTEGERS = range(-(2**63), 2**64)  # what a record can carry


def plain(value: Any, path: str = "") -> Any:
    """`value` in JSON's own types: numpy scalars and arrays become numbers and lists, dates ISO text.

    Raises:
        ValueError: for what has no such form (bytes, NaN, foreign objects); the message names the key.
    """
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, path)
        case int():
            if value not in _INTEGERS:
                raise ValueError(f"{_named(path)} is beyond 64 bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{_named(path)} is {value}, which JSON cannot hold; write null")
            return float(value)
        case Mapping():
            return {_key(key, path): plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
        case np.ndarray() | np.generic():
            return plain(value.tolist(), path)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case UUID():
            return str(value)
        case bytes() | bytearray() | memoryview():
            raise ValueError(f"{_named(path)} holds bytes; a task's data is text, numbers, lists and objects")
        case _:
            raise ValueError(f"{_named(path)} is a {type(value).__name__}, which has no form in JSON")


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{_named(path)} has the key {key!r}, which is no text")
    return _text(key, path)


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_named(path)} holds a lone surrogate, which is no text") from None
    return str(value)


def _named(path: str) -> str:
    return f"the value of {path!r}" if path else "the row"
