"""Errors in OpenAI's form: `{"error": {message, type, param, code}}` with a fitting status."""

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from headrace.platform.contracts import RefusalCode
from headrace.platform.errors import DeadlineExceeded, DoorRefused, EngineDead, EngineError, VersionUnavailable

_STATUS = {
    RefusalCode.INVALID: 400,
    RefusalCode.UNKNOWN: 404,
    RefusalCode.CONFLICT: 409,
    RefusalCode.OVER: 410,
    RefusalCode.FULL: 429,
    RefusalCode.AWAY: 503,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}
_RETRY_AFTER_S = "1"


def status_of(error: Exception) -> int:
    """The HTTP status of what was raised."""
    match error:
        case DoorRefused():
            return _STATUS[RefusalCode(error.code)]
        case DeadlineExceeded():
            return 504
        case VersionUnavailable() | EngineDead():
            return 503
        case EngineError():
            return 500
        case _:
            return 500


def error_body(message: str, status: int, field: str = "", code: str = "") -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "conflict_error")
    return {"error": {"message": message, "type": kind, "param": field or None, "code": code or None}}


def body_of(error: Exception) -> dict[str, Any]:
    """The body for what was raised; of what nobody expected, clients are told nothing but that it happened."""
    status = status_of(error)
    if isinstance(error, DoorRefused):
        return error_body(str(error), status, error.field, error.code)
    known = isinstance(error, EngineError | DeadlineExceeded)
    return error_body(str(error) if known else "the door failed; its log says how", status)


def error_response(body: dict[str, Any], status: int) -> JSONResponse:
    """An error as a response; where trying again may help, it says when."""
    headers = {"Retry-After": _RETRY_AFTER_S} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


def refused(error: Exception) -> JSONResponse:
    """The response to what was raised."""
    return error_response(body_of(error), status_of(error))


def invalid(error: ValidationError) -> DoorRefused:
    """What is wrong with a body, by the first field that is."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    message = first["msg"].removeprefix("Value error, ")
    return DoorRefused(f"{where or 'body'}: {message}", RefusalCode.INVALID, where)
