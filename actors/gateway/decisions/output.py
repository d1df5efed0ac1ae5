"""What a tool gave, made fit to be read: bounded, nothing in it but text that can be seen, and without secrets.

Owns what is done to the text of every result, whoever performed the call, before model, record and terminal get it.
Honest output, source code in any script included, is not changed. Role markers and special tokens are not touched
either: renderers encode results as plain text, so that they are only characters (case T5).

What is neutralised: escape sequences of terminals are taken out; a carriage return that ends no line becomes a line
end; other control characters become their pictures; what is not shown (bidirectional overrides, zero-width characters,
tags, fillers, variation selectors) is named as `<U+202E>`, and long runs are counted. Joiners and selectors between
letters and emoji of scripts that need them stay.
"""

import base64
import functools
import re
from collections.abc import Sequence
from urllib.parse import quote, quote_plus

from headrace.actors.text import well_formed_text

# All of ASCII that is not plain. Deleting it is ten times as fast as searching for it.
_ASCII_CONTROLS = bytes([*range(9), *range(11, 32), 127])
_SELECTORS, _JOINERS, _KEYCAP = "\ufe00-\ufe0f", "\u200c\u200d", "\u20e3"
_HIDDEN = (
    "\x80-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f"


def _characters(ranges: str) -> frozenset[str]:
    spans = re.findall("(.)-(.)|(.)", ranges, re.DOTALL)
    return frozenset(chr(c) for a, b, one in spans for c in range(ord(a or one), ord(b or one) + 1))


_UNSEEN = _characters(_SELECTORS + _JOINERS + _HIDDEN)
_UNPLAIN = _UNSEEN | _characters(f"{_CONTROLS}\r\ud800-\udfff")
_SHOWN: dict[int, str] = {
    **{ord(hidden): f"<U+{ord(hidden):04X}>" for hidden in _characters(_HIDDEN)},
    **{ord(control): chr(0x2400 + ord(control)) for control in _characters(_CONTROLS)},
    0x7F: "\u2421",
}
# A payload ends before whatever could begin another sequence: nothing is read twice, and an open one hides nothing.
_STRINGS = "\x90\x98\x9d-\x9f"
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    rf"|(?:\x1b[\]PX^_]|[{_STRINGS}])[^\x07\x1b\x9b\x9c{_STRINGS}\n]{{0,4096}}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b(?:[ -/]{1,3}[0-~]|[0-~])"
)
_RETURN = re.compile(r"\r(?!\n)")
_JOINED = re.compile(f"[{_SELECTORS}{_JOINERS}]+")
_LONG_RUN = re.compile(f"[{_HIDDEN}]{{9,}}")
_STARTS, _CONTROL = re.compile("[\x1b\x90-\x9f]"), re.compile(f"[{_CONTROLS}]")
_REDACTED = "[secret]"
# How much more than the limit is looked at: taking escape sequences out may leave less.
_SPARE = 4


def fit(text: str, limit_bytes: int) -> tuple[str, int]:
    """`text` neutralised and bounded, and how many bytes were left out; work is bounded too."""
    if len(text) <= limit_bytes and text.isascii() and neutralised(text) is text:
        return text, 0
    looked_at, out = bounded(text, _SPARE * limit_bytes)
    shown, more = bounded(neutralised(looked_at), limit_bytes)
    return shown, out + more


def bounded(text: str, limit_bytes: int) -> tuple[str, int]:
    """Head and tail of `text` in at most `limit_bytes` of UTF-8, and how many bytes were left out between them.

    What is left out is said in its place; only a limit that has no room for that note is exceeded by it.
    """
    if 4 * len(text) <= limit_bytes or (len(text) <= limit_bytes and text.isascii()):
        return text, 0
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text, 0
    room = max(limit_bytes - len(_note(len(data))), 0)
    head = data[: room // 2].decode("utf-8", "ignore")  # a character that is cut belongs to what is left out
    tail = data[len(data) - (room - room // 2) :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}{_note(left_out)}{tail}", left_out


def _note(left_out: int) -> str:
    return f"\n[... {left_out} bytes left out ...]\n"


def neutralised(text: str) -> str:
    """`text` with nothing in it but what is seen. Done twice it is the same."""
    if text.isascii():
        data = text.encode()
        if len(data.translate(None, _ASCII_CONTROLS)) == len(data):
            return text
        return _seen(text)
    if _UNPLAIN.isdisjoint(text):
        return text
    plain = _JOINED.sub(_joined, well_formed_text(text).removeprefix("\ufeff"))  # while their neighbours are there
    return _LONG_RUN.sub(_counted, _seen(plain)).translate(_SHOWN)


def _seen(text: str) -> str:
    """Without sequences, carriage returns and controls."""
    plain = _SEQUENCE.sub("", text) if _STARTS.search(text) else text
    plain = _RETURN.sub("\n", plain)
    return plain.translate(_SHOWN) if _CONTROL.search(plain) else plain


def _joined(match: re.Match[str]) -> str:
    """Joiners and selectors: as they are where a script or an emoji has them."""
    text, found, end = match.string, match[0], match.end()
    before, after = text[match.start() - 1 : match.start()], text[end : end + 1]
    joiner = found if found[0] in _JOINERS else found[1:]
    fits = joiner == "" or (len(joiner) == 1 and joiner in _JOINERS and _is_letter(after))
    if fits and _is_letter(before):
        return found
    if found == "\ufe0f" and after == _KEYCAP and before in "0123456789#*":
        return found
    return "".join([f"<U+{ord(character):04X}>" for character in found]) if len(found) < 9 else _counted(match)


def _is_letter(character: str) -> bool:
    return character != "" and not character.isascii() and character not in _UNSEEN


def _counted(match: re.Match[str]) -> str:
    return f"<{len(match[0])} hidden characters, the first U+{ord(match[0][0]):04X}>"


def redacted(text: str, secrets: Sequence[str]) -> str:
    """`text` without any of `secrets`, as they are, percent-encoded, or in base64 or hex by themselves. Redact what is
    neutralised already: taking an escape sequence out may put a secret together."""
    pattern = _pattern(tuple(secrets))
    return text if pattern is None else pattern.sub(_REDACTED, text)


@functools.lru_cache(maxsize=256)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    forms: set[str] = set()
    for secret in secrets:
        data = secret.encode("utf-8", "replace")
        encoded = (base64.b64encode(data), base64.urlsafe_b64encode(data))
        forms |= {secret, quote(data), quote(data, ""), quote_plus(data), data.hex(), data.hex().upper()}
        forms |= {each.decode().rstrip("=") for each in encoded}
    forms.discard("")
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
