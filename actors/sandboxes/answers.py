"""What the shell in a box is told and answers, as bytes: see script.py for what it means.

The answers come on a way that a command can find and write to: only what answers what was asked last counts, everything
else is bounded and dropped.
"""

from typing import NamedTuple

_MOST_BYTES = 1 << 20
_MOST_NOTHING = 1024
"""Fields that answer nothing that was asked."""
_CODE_DIGITS = 3
_KILLED = 137
READY, ENDED, DEAD = b"R", b"E", b"D"


class Answer(NamedTuple):
    """One answer. `word`: what is left on the shell's death, else the processes that it listed."""

    kind: bytes
    number: int
    word: bytes
    directory: bytes = b""
    exports: bytes = b""

    @property
    def was_hit(self) -> bool:
        """Whether the shell was killed because of a signal to the outer one."""
        return self.kind == DEAD and self.word == b"1"

    @property
    def code(self) -> int:
        """What a command ended with. One whose shell was killed by a signal to the outer one did not succeed."""
        return self.number or (_KILLED if self.was_hit else 0)


class Answers:
    """Finds answers in what comes on standard error, which may say anything else too."""

    def __init__(self) -> None:
        self._held = b""
        self._dropped = 0

    def __bool__(self) -> bool:
        """Whether something is held that was in no answer yet."""
        return bool(self._held)

    def next(self, data: bytes, kinds: bytes, names: tuple[bytes, ...]) -> Answer | None:
        """The first answer of one of `kinds` to one of `names`, `data` being what came since the last call; None while
        there is none.

        Raises:
            ValueError: too much came that is no answer.
        """
        self._held += data
        if len(self._held) > _MOST_BYTES:
            raise ValueError("an answer has no end")
        *fields, last = self._held.split(b"\0", _MOST_NOTHING + 1)
        for at, field in enumerate(fields):
            words = field.split(b" ", 3)
            if len(words) != 4 or words[0] not in (READY, ENDED, DEAD) or words[0] not in kinds:
                continue
            if words[1] not in names or not _is_code(words[2]):
                continue
            alone = words[0] == DEAD
            if not alone and at + 1 == len(fields):
                return None  # the directory is still to come
            self._held = b"\0".join((*fields[at + (1 if alone else 2) :], last))
            self._dropped = 0
            state = (b"", b"") if alone else (fields[at + 1], fields[at - 1] if at else b"")
            return Answer(words[0], int(words[2]), words[3], *state)
        self._dropped += max(len(fields) - 1, 0)
        if self._dropped >= _MOST_NOTHING:
            raise ValueError("they answer nothing that was asked")
        self._held = b"\0".join((*fields[-1:], last))  # they may be the exports of what is still to come
        return None


def start(token: str, name: str, keep: bytes, text: bytes) -> bytes:
    """The message that has an inner shell started, which evaluates `text` first."""
    return b"start %b %b %d %b\n%b\n" % (token.encode(), name.encode(), text.count(b"\n") + 1, keep, text)


def run(name: str, text: bytes) -> bytes:
    """The message that has a command run. One line is part of it, unless the shell would take its end for its own."""
    lines = text.count(b"\n") + 1
    if lines == 1 and not text.endswith(b"|"):
        return b"%b|0|%b\n" % (name.encode(), text)
    return b"%b|%d|\n%b\n" % (name.encode(), lines, text)


def _is_code(word: bytes) -> bool:
    return len(word) <= _CODE_DIGITS and word.isdigit() and int(word) <= 255
