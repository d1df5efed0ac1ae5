"""What single values of `permissions` must look like. Each function refuses its value, and says what to write instead.

A value that could never fit anything is refused: it would be read as a boundary, or as leave, and be neither. Whether
what is named exists is left to `actors/gateway/checking.py`.
"""

import ipaddress
import re
from collections.abc import Callable

_NAMES = re.compile(r"[A-Za-z0-9_*?\[\]!.-]+")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_SEPARATORS = re.compile(r"[/\\]")
_NEVER = ("proc", "sys", "dev")
_APPROVERS = ("deny", "queue")


def every(check: Callable[[str], None]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """A validator of lists: each value has to pass `check`."""

    def checked(value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            check(each)
        return value

    return checked


def check_approver(value: str) -> None:
    """Who approves. Raises ValueError for what is neither a known word nor the name of a function."""
    place, colon, attribute = value.rpartition(":")
    is_file = place.endswith(".py") and place != ".py"
    is_place = is_file or all(part.isidentifier() for part in place.split("."))
    if value in _APPROVERS or (colon and is_place and all(part.isidentifier() for part in attribute.split("."))):
        return
    raise ValueError(
        f"{value!r} can approve of nothing; write deny, queue, or a function as ./file.py:name or package.module:name"
    )


def check_domain(value: str) -> None:
    """A pattern of host names. Raises ValueError for one that no host name can fit."""
    bare = value.removesuffix(".")
    if "://" in value or "/" in value:
        raise ValueError(f"{value!r} is no host name; write the name alone, such as example.org or *.example.org")
    if not value.isascii():
        raise ValueError(f"{value!r}: write the name in its ASCII form, which begins with xn--")
    if _NUMBER.fullmatch(bare.rpartition(".")[2]) or _is_address(value):
        raise ValueError(f"{value!r} is a network address, which no name fits; list it in permissions.addresses")
    if not _NAMES.fullmatch(bare) or "" in bare.split("."):
        raise ValueError(f"{value!r} is no host name; write one such as example.org or *.example.org, without a port")


def check_expression(value: str) -> None:
    """A regular expression. Raises ValueError where it is none."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}; put \\ before signs that are meant") from None


def check_folder(value: str) -> None:
    """A folder, as seen from the workspace. Raises ValueError for one under which no path can lie."""
    parts = _parts(value)
    if any(sign in value for sign in "*?["):
        raise ValueError(f"{value!r}: a folder is no pattern, and all under it is meant; write src for src/*")
    if value.startswith("/") and parts[:1] and parts[0] in _NEVER:
        raise ValueError(f"{value!r} is never allowed; nothing under /proc, /sys and /dev is")


def check_network(value: str) -> None:
    """A network. Raises ValueError where it is none."""
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network such as 127.0.0.1/32 or 10.0.0.0/8") from None


def check_path_pattern(value: str) -> None:
    """A pattern of paths, as seen from the workspace. Raises ValueError for one that leads out of it."""
    _parts(value)


def _parts(value: str) -> list[str]:
    if not value.strip():
        raise ValueError("a path cannot be empty; write . for the workspace")
    parts = [part for part in _SEPARATORS.split(value) if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f'{value!r} leads out of the workspace; write a path without "..", relative to it')
    if value.startswith(("~", "$")):
        raise ValueError(f"{value!r}: ~ and variables are not read; write a path relative to the workspace")
    return parts


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
