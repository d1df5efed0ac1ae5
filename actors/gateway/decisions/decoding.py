"""Texts that one text may stand for: as it is, percent-encoded, escaped, in base64, base32 or hex, a URL's parts.

Owns how an argument could carry a text without spelling it. It finds what is common, not what is clever: a model that
wants to hide a text can. Work is bounded by the length of the text.
"""

import base64
import binascii
import html
import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote_plus

_LAYERS = 2
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_SIGN = re.compile(r"[%\\]|&.{2,31}?;|[0-9A-Za-z+/_-]{11}|(?:[0-9a-fA-F]{2}[ :]){7}")
_RUN = re.compile(r"[0-9A-Za-z+/_-]{11}")
_NO_WORD, _LONG_WORD = re.compile(r"[0-9+/_-]{11}"), re.compile(r"[A-Za-z2-7]{13}")
_PAIRS = re.compile(r"[0-9a-fA-F :]{16}")
_LEAST = 11  # characters of base64 for 8 of text
_BASE64 = re.compile(r"[0-9A-Za-z+/_-]{11,}")
_BASE32 = re.compile(r"[A-Za-z2-7]{13,}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[ :]?){8,}")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s\"'<>]+|^(?://|www\.)\S+")
_BETWEEN_PARTS = re.compile(r"[/?#&=:@;,\s]+")


def readings(text: str) -> Iterator[str]:
    """`text`, what it is decoded to, in up to two layers, and of URLs among these the parts."""
    layer = [text]
    for depth in range(_LAYERS + 1):
        for each in layer:
            yield each
            if "//" in each or each.startswith("www."):
                for url in _URL.findall(each):
                    yield from _BETWEEN_PARTS.split(url)
        if depth == _LAYERS or not (
            layer := [found for each in layer if _SIGN.search(each) for found in _decoded(each)]
        ):
            return


def is_plain(text: str) -> bool:
    """Whether `text` has no other reading than itself; may say no where it is so. Most texts and paths are plain."""
    if "%" in text or "\\" in text or "&" in text or "//" in text or text.startswith("www."):
        return False
    if _PAIRS.search(text):
        return False
    # Of what could be base64, nothing is read that is lower case and has a letter: see `_from_base64`.
    return not _RUN.search(text) or (text.islower() and not _NO_WORD.search(text) and not _LONG_WORD.search(text))


def _decoded(text: str) -> Iterator[str]:
    if "%" in text:
        yield unquote_plus(text)
    if "\\" in text:
        yield _ESCAPE.sub(_unescaped, text)
    if "&" in text:
        yield html.unescape(text)
    for run in _BASE64.findall(text):
        yield from _from_base64(run)
        if "/" in run:  # of a path, each part by itself
            for part in run.split("/"):
                yield from _from_base64(part)
    for run in _BASE32.findall(text):
        yield from _bytes_as_text(base64.b32decode, run.upper()[: len(run) // 8 * 8])
    for run in _HEX.findall(text):
        yield from _bytes_as_text(bytes.fromhex, run.replace(":", " "))


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _CONTROLS.get(match[3], match[3])


def _from_base64(run: str) -> Iterator[str]:
    if len(run) < _LEAST or run.islower():  # words and paths
        return
    plain = run.replace("-", "+").replace("_", "/")
    yield from _bytes_as_text(base64.b64decode, plain + "=" * (-len(plain) % 4) if len(plain) % 4 != 1 else plain[:-1])


def _bytes_as_text(decode: Callable[[str], bytes], encoded: str) -> Iterator[str]:
    """What is text of it; most runs of letters are no encoded text at all."""
    try:
        text = decode(encoded).decode("utf-8", "ignore")
    except (ValueError, binascii.Error):
        return
    if 3 * len(text) >= len(encoded) and text.isprintable():
        yield text
