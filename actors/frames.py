"""Where in somebody's own code an error came from: the file and line that a message names.

"Own" is whatever is neither headrace, nor the standard library, nor an installed package. An environment that is
itself installed has no such frame; then the line at which headrace entered it is named.
"""

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import headrace


def described(error: BaseException) -> str:
    """An error on one line, with the place it came from: `maze.py:7 in step: KeyError: 'wall'`."""
    where = own_frame(error)
    text = f"{type(error).__name__}: {message_of(error)}"
    return f"{where}: {text}" if where else text


def message_of(error: BaseException) -> str:
    """What the error says; foreign errors cannot even be trusted with that."""
    if isinstance(error, SyntaxError):
        return error.msg
    try:
        return str(error)
    except Exception:  # an error whose __str__ raises must not hide what went wrong
        return "(its message cannot be read)"


def own_frame(error: BaseException) -> str:
    """The innermost frame of somebody's own code, as `maze.py:7 in step`; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    entered = ""
    for file, line, function in _frames(error):
        if file.startswith(_packages()):
            entered = entered or _place(file, line, function)
        elif not file.startswith(_standard_library()):
            return _place(file, line, function)
    return entered


def user_frame(error: BaseException, file: Path) -> str:
    """The innermost frame that lies in `file`, as `sums.py:7 in reward`; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file.name}:{error.lineno}"
    return next((_place(*frame) for frame in _frames(error) if frame[0] == str(file)), "")


def defined_at(thing: Callable[..., Any] | type) -> str:
    """Where a function or class is defined, as `sums.py:3`; its name where that cannot be told."""
    if not inspect.isclass(thing):
        code = getattr(inspect.unwrap(thing), "__code__", None)
        if code is not None:
            return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    try:
        return f"{Path(inspect.getsourcefile(thing) or '').name}:{inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):  # built in, or made by a program
        return getattr(thing, "__qualname__", type(thing).__qualname__)


def _frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """File, line and function of each frame outside of headrace, innermost first."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith(("<", _headrace())):
            yield file, line, frame.f_code.co_name


def _place(file: str, line: int, function: str) -> str:
    place = f"{Path(file).name}:{line}"
    return place if function.startswith("<") else f"{place} in {function}"


@functools.cache
def _headrace() -> str:
    return f"{Path(headrace.__file__).parent}/"


@functools.cache
def _packages() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib")})


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
