"""Whether a text is taken from another: what arguments hold or stand for, compared with what was shown.

A text is taken from another where both share `SHARED` characters in a row, forwards or backwards; a shorter one where
it is a whole word of the other. Case, width, runs of space, what is not seen, and schemes of URLs do not count, nor
does what the trusted text holds too. Work is bounded: see `carried`.
"""

import re
import string
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.actors.gateway.decisions.decoding import is_plain, readings
from headrace.actors.gateway.decisions.runs import BETWEEN, SHARED, Runs, held_by

_SHORTEST = 3
_LETTERS = 4  # of the characters in a row: rulers and brackets are nobody's text
_MOST_HELD, _MOST_READ = 32 * 1024, 128 * 1024  # characters that arguments hold, and that they stand for
_MOST_TEXTS = 512
_MOST_SHORT = 64
_MOST_PLACES = 1000
_ONE_BY_ONE = 1_000_000  # characters to look through, above which an index is quicker
_SCHEME = re.compile(r"\b[a-z][a-z0-9+.-]*://(?:www\.)?")
_NAMED = re.compile(r"<u\+[0-9a-f]{4,6}>")  # what neutralising puts for what is not seen
_UNSEEN_KINDS = ("Cf", "Mn", "Cc", "Cs")
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f"
_FOLDED = bytes.maketrans(
    (string.ascii_uppercase + _SPACES).encode(), (string.ascii_lowercase + " " * len(_SPACES)).encode()
)


def normal(text: str) -> str:
    """What texts are compared by."""
    if not text.isascii():
        wide = unicodedata.normalize("NFKC", text)
        text = "".join([each for each in wide if each.isspace() or unicodedata.category(each) not in _UNSEEN_KINDS])
        text = " ".join(text.casefold().split())
    else:
        text = text.encode().translate(_FOLDED).decode()
    if "<u+" in text:
        text = _NAMED.sub("", text)
    if "://" in text:
        text = _SCHEME.sub(" ", text)
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip(" ")


@dataclass(slots=True)
class Carried:
    """The texts of one call, normal: those of `SHARED` characters and more, and shorter ones."""

    long: tuple[str, ...]
    short: tuple[str, ...]
    both_ways: str
    """The long ones, forwards and backwards, in one."""

    def suspects(self, runs: Runs, trusted: str) -> "Suspects":
        """Its runs that may have been shown and that `trusted`, which is normal, does not hold."""
        found = [run for run in runs.suspects(self.both_ways) if _is_text(run)] if self.long else []
        return Suspects(self.short, trusted, _without(found, trusted) if found else found)

    def is_within(self, trusted: str) -> bool:
        """Whether `trusted` holds all of it."""
        return all(text in trusted for text in (*self.long, *self.short))


@dataclass(slots=True)
class Suspects:
    """What of a call may be taken from somewhere: short words, and runs of which `trusted` has none."""

    short: tuple[str, ...]
    trusted: str
    runs: list[str]

    def are_from(self, shown: str) -> bool:
        """Whether any is taken from `shown`, which is normal, and not from what is trusted."""
        for word in self.short:
            if _is_word(word, shown) and not _is_word(word, self.trusted):
                return True
        if len(self.runs) * len(shown) > _ONE_BY_ONE:
            return bool(held_by(self.runs, shown).any())
        return any(run in shown for run in self.runs)


def carried(arguments: Mapping[str, Any]) -> Carried | None:
    """What arguments hold or stand for; None where that is more than can be looked at."""
    long: dict[str, None] = {}
    short: dict[str, None] = {}
    values: list[str] = []
    held = read = 0
    for number, (text, is_value) in enumerate(_texts(arguments)):
        held += len(text)
        if number >= _MOST_TEXTS or held > _MOST_HELD:
            return None
        if is_value:
            values.append(text)
        for reading in (text,) if is_plain(text) else readings(text):
            read += len(reading)
            if read > _MOST_READ or len(short) > _MOST_SHORT:
                return None
            plain = normal(reading)
            if len(plain) >= SHARED:
                long[plain] = None
            elif is_value and len(plain) >= _SHORTEST:
                short[plain] = None
    if len(values) > 1 and len(pieces := normal("".join(values))) >= SHARED:
        long = {text: None for text in long if text not in pieces} | {pieces: None}  # of which it has all runs
    texts = tuple(long)
    return Carried(texts, tuple(short), BETWEEN.join((*texts, *(text[::-1] for text in texts))))


def _texts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """All texts in arguments, and whether they are values, of which short ones count: not names, not numbers."""
    rest: list[Any] = [arguments]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value, True
        elif isinstance(value, int | float):
            yield str(value), False
        elif isinstance(value, dict | Mapping):
            for name in value:
                if len(name) >= SHARED:
                    yield name, False
            rest += list(value.values())[::-1]
        elif isinstance(value, Sequence):
            rest += value[::-1]


def _is_word(word: str, text: str) -> bool:
    start, places = text.find(word), 0
    while start >= 0:
        end = start + len(word)
        if not (text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()):
            return True
        places += 1
        if places > _MOST_PLACES:
            return True
        start = text.find(word, start + 1)
    return False


def _is_text(run: str) -> bool:
    return run.isalnum() or (BETWEEN not in run and sum(map(str.isalnum, run)) >= _LETTERS)


def _without(runs: list[str], text: str) -> list[str]:
    """Those of `runs` that `text` does not hold."""
    if len(runs) * len(text) <= _ONE_BY_ONE:
        return [run for run in runs if run not in text]
    return [run for run, is_held in zip(runs, held_by(runs, text).tolist(), strict=True) if not is_held]
