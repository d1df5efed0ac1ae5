"""Paths as a model writes them: one normal form, or no path at all.

A path is looked at as it stands and as programs might read it: with compatible characters made plain (NFKC), percent
signs decoded, backslashes as slashes. Each of these readings has to be allowed. Symbolic links are not looked at: they
lie in the sandbox, which resolves them inside of itself.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator
from urllib.parse import unquote

from headrace.actors.gateway.decisions.patterns import Patterns

_MOST_CHARS = 4096
_ROOTS: Patterns = (".", "/tmp")
_WORKSPACE = "workspace"
_NEVER = ("/proc", "/sys", "/dev")
_PLAIN = re.compile(r"[A-Za-z0-9_ @+,=.-]+(?:/+[A-Za-z0-9_ @+,=.-]+)*/?")
"""A relative path that has one reading; whether one of its parts is "..", is looked at apart."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_SHELL = re.compile(r"[`]|\$[({]|^\$\w+(?:/|$)|^~")
_DECODINGS = 4


@functools.lru_cache(maxsize=256)
def readings(path: str) -> tuple[str, ...]:
    """The normal forms of `path`, as seen from the workspace: relative ones without a leading "./", "." itself,
    absolute ones from "/". What lies under /workspace, where boxes have it, is relative to it.

    Raises:
        ValueError: it is no path that can be given. The message is for the model.
    """
    if _PLAIN.fullmatch(path) and len(path) <= _MOST_CHARS:
        return (_normal(path),)
    if not path:
        raise ValueError("a path cannot be empty")
    if len(path) > _MOST_CHARS:
        raise ValueError(f"a path has at most {_MOST_CHARS} characters")
    return tuple(dict.fromkeys(_normal(_checked(text)) for text in _texts(path)))


def is_allowed(normal: str, roots: Patterns) -> bool:
    """Whether a normal form lies under one of a policy's `paths`; where it has none, in the workspace or /tmp."""
    if normal.startswith("/") and any(_under(normal, never) for never in _NEVER):
        return False
    return any(_under(normal, root) for root in _normal_roots(roots or _ROOTS))


def path_problem(path: str, roots: Patterns) -> str:
    """Why `path` may not be used, for the model; empty where it may."""
    try:
        normals = readings(path)
    except ValueError as error:
        return str(error)
    for normal in normals:
        if not is_allowed(normal, roots):
            break
    else:
        return ""
    return f"the path {path:.80} may not be used; only what lies in {_shown(roots)}"


def _shown(roots: Patterns) -> str:
    named = ["the workspace" if root == "." else root for root in _normal_roots(roots or _ROOTS)]
    return " or ".join(named)


def _texts(path: str) -> Iterator[str]:
    yield path
    text = unicodedata.normalize("NFKC", path)
    for _ in range(_DECODINGS):
        text = text.replace("\\", "/")
        yield text
        if (decoded := unicodedata.normalize("NFKC", unquote(text, errors="replace"))) == text:
            return
        text = decoded
    raise ValueError("the path is encoded too often; write it as it is")


def _checked(text: str) -> str:
    if any(unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in text):
        raise ValueError("a path has no control characters, and none that are invisible")
    if _SCHEME.match(text):
        raise ValueError("a path is no URL; write it relative to the workspace")
    if _SHELL.search(text):
        raise ValueError("a path stands for itself: without ~, variables or commands; relative to the workspace")
    return text


def _normal(text: str) -> str:
    parts = text.split("/")
    if "" in parts or "." in parts:
        parts = [part for part in parts if part not in ("", ".")]
    if ".." in parts:
        raise ValueError('a path has no ".." in it; write it relative to the workspace')
    if not text.startswith("/"):
        return "/".join(parts) or "."
    if parts[:1] == [_WORKSPACE]:
        return "/".join(parts[1:]) or "."
    return "/" + "/".join(parts)


def _under(normal: str, root: str) -> bool:
    if root in (".", "/"):
        return normal.startswith("/") == (root == "/")
    return normal == root or normal.startswith(f"{root}/")


@functools.lru_cache(maxsize=256)
def _normal_roots(roots: Patterns) -> Patterns:
    return tuple(_normal(root) for root in roots)
