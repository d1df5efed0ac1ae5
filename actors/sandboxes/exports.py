"""What a shell says that it exports, read strictly: the shell is the agent's, and what it says is shell text.

Only names with quoted values are taken from it, and are quoted again before another shell reads them.
"""

import functools
import re

_LINE = re.compile(
    rb"(?:export|declare -[b-eg-mo-zB-Z]*x[b-eg-mo-zB-Z]*) ([A-Za-z_][A-Za-z0-9_]*)"
    rb"(=(?:\"(?:[^\"\\$`]++|\\.)*+\"|'[^']*+'|\$'(?:[^'\\]++|\\.)*+')++)?(?:\n|\Z)",
    re.DOTALL,
)
_PART = re.compile(rb"\"((?:[^\"\\$`]++|\\.)*+)\"|'([^']*+)'|\$'((?:[^'\\]++|\\.)*+)'", re.DOTALL)
_IN_DOUBLE = re.compile(rb"\\([\"\\$`])")
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_SHORT, _MOST_REMEMBERED = 4096, 64
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v", b"e": b"\x1b"}


def exported(said: bytes) -> bytes:
    """Lines that export what `said` (the answer of `export -p`) exports; all else in it is dropped."""
    return _remembered(said) if len(said) <= _SHORT else _read(said)


def _read(said: bytes) -> bytes:
    lines = []
    at = 0
    while at < len(said):
        found = _LINE.match(said, at)
        if found is None:
            at = said.find(b"\n", at) + 1 or len(said)
            continue
        at = found.end()
        value = b"" if found[2] is None else b"=" + _quoted(b"".join(map(_plain, _PART.finditer(found[2]))))
        lines.append(b"export " + found[1] + value)
    return b"\n".join(lines)


_remembered = functools.lru_cache(_MOST_REMEMBERED)(_read)
"""Fresh boxes all say the same."""


def _plain(part: re.Match[bytes]) -> bytes:
    double, single, escaped = part.groups()
    if double is not None:
        return _IN_DOUBLE.sub(rb"\1", double)
    return bytes(single) if single is not None else _ESCAPE.sub(_letter, escaped)


def _letter(found: re.Match[bytes]) -> bytes:
    octal, hexadecimal, letter = found.groups()
    if letter is not None:
        return _LETTERS.get(letter.lower() if letter == b"E" else letter, letter)
    return bytes([(int(octal, 8) if octal is not None else int(hexadecimal, 16)) & 0xFF])


def _quoted(value: bytes) -> bytes:
    return b"'" + value.replace(b"\0", b"").replace(b"'", b"'\"'\"'") + b"'"
