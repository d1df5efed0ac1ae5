"""What clients send, read: a bounded body, JSON that every store can take, in the shape of a schema.

Numbers without end are no JSON, though Python's reader takes them. Half a surrogate pair is replaced wherever it
stands, for neither tokenizer nor store accepts one (case X10).
"""

import json
import math
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from headrace.platform.contracts import RefusalCode
from headrace.platform.errors import DoorRefused
from headrace.serving.openai.refusals import invalid

_MOST_BODY = 64 << 20
_MOST_DEPTH = 200  # of what is stored or rendered; whoever encodes it again recurses once a level
B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], *, may_be_empty: bool = False) -> B:
    """The body as a `kind`. Raises DoorRefused, and names the field."""
    try:
        return kind.model_validate(await read_json(request, may_be_empty=may_be_empty))
    except ValidationError as error:
        raise invalid(error) from None


async def read_json(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object. Raises DoorRefused."""
    data = await _bounded(request)
    if not data and may_be_empty:
        return {}
    try:
        value = strict_json(data)
    except ValueError as error:
        raise DoorRefused(f"the body is no JSON: {error}", RefusalCode.INVALID) from None
    if not isinstance(value, dict):
        raise DoorRefused("the body must be a JSON object", RefusalCode.INVALID)
    return value


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text, its strings well formed. Raises ValueError."""
    try:
        value = json.loads(text, parse_constant=_endless, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _well_formed(value, _MOST_DEPTH)


async def _bounded(request: Request) -> bytes:
    """The body, of which no more is held than is read in the end."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > _MOST_BODY:
            raise DoorRefused(f"the body has more than the {_MOST_BODY} bytes that are read", RefusalCode.INVALID)
        pieces.append(piece)
    return b"".join(pieces)


def _well_formed(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, dict):
        return {_well_formed(key, 0): _well_formed(each, depth - 1) for key, each in value.items()}
    return [each if isinstance(each, int) else _well_formed(each, depth - 1) for each in value]


def _endless(name: str) -> float:
    raise ValueError(f"{name} is no number that JSON has")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _endless(text)
