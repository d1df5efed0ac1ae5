"""What a tool returned, as the model sees it: text as it is, None as `ok`, anything else as JSON with sorted keys.

What JSON cannot say is the tool's fault and is refused, never rewritten: NaN is not null, bytes are not base64 and a
key that is a number is not text.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic_core import to_jsonable_python

from headrace.actors.environments.doors.function_schema import ToolFunction
from headrace.actors.frames import defined_at
from headrace.platform.errors import EnvironmentFault

_BYTES = (bytes, bytearray, memoryview)


def result_text(value: Any, tool: ToolFunction) -> str:
    """`value` for the model.

    Raises:
        EnvironmentFault: it is no JSON; names the tool's file and line, and the place in the value.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return "ok"
    try:
        # Checked before it is encoded: the encoder has a form for what is refused here.
        _check(msgspec.to_builtins(value, enc_hook=_plain, builtin_types=_BYTES), "it")
        return msgspec.json.encode(value, enc_hook=_plain, order="deterministic").decode()
    except Exception as error:  # whatever a foreign object does when it is read
        raise EnvironmentFault(
            f"{defined_at(tool.function)}: {tool.spec.name} returned {type(value).__name__},"
            f" which is not JSON: {error}",
            transient=False,
        ) from error


def _check(value: Any, place: str) -> None:
    """Raise ValueError that names the place of what is refused."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}; return None or say it in words")
    if isinstance(value, _BYTES):
        raise ValueError(f"{place} is bytes; decode it")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place} has the key {key!r:.80}, which is no text; use str(key)")
            _check(item, f"{place}[{key!r:.80}]")
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            _check(item, f"{place}[{number}]")


def _plain(value: Any) -> Any:
    """What msgspec does not know: arrays and their numbers, and models of pydantic."""
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    return to_list() if to_list is not None else to_jsonable_python(value)
