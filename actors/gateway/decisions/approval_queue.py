"""Calls that wait for somebody's word, as files: what the gateway writes and `headrace approvals` answers.

::

    HOME/approvals/ID.json      0600: the call, written by the gateway, gone once it is decided
    HOME/approvals/ID.answer    0600: yes or no to exactly that call

An answer names the question's id, the session's scope, the call's key, and the hash of tool and arguments as they were
shown. Whoever asked compares all of them with what it holds in memory, and an id is never used again: an answer to
another call, copied or kept, is a no.
"""

import getpass
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.platform.errors import NotFound
from headrace.platform.hashing import digest_value

T = TypeVar("T")
_MOST_BYTES = 16 * 1024 * 1024


class Question(msgspec.Struct, frozen=True):
    """A call that waits. Times are seconds since the epoch; `scope` is the session's, "EPISODE/BRANCH#…"."""

    question_id: str
    tool: str
    arguments: dict[str, Any]
    scope: str
    key: str
    taint: tuple[str, ...]
    asked_at_s: float
    deadline_s: float

    @property
    def arguments_hash(self) -> str:
        """Of tool and arguments, as they are shown."""
        return digest_value([self.tool, self.arguments])


class Answer(msgspec.Struct, frozen=True):
    """Yes or no to one question."""

    question_id: str
    scope: str
    key: str
    arguments_hash: str
    granted: bool
    by: str = ""


def ask(folder: Path, question: Question) -> None:
    """Write a question down. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(folder / f"{question.question_id}.json", question)


def questions(folder: Path, now_s: float) -> list[Question]:
    """Those that can still be answered, the oldest first."""
    found = (_read(path, Question) for path in folder.glob("*.json"))
    open_ones = [each for each in found if each is not None and each.deadline_s > now_s]
    return sorted(open_ones, key=lambda each: each.asked_at_s)


def reply(folder: Path, prefix: str, granted: bool, now_s: float) -> Question:
    """Answer the question whose id begins with `prefix`; which one that was.

    Raises:
        NotFound: there is none, or several.
    """
    waiting = questions(folder, now_s)
    fitting = [each for each in waiting if prefix and each.question_id.startswith(prefix)]
    if len(fitting) != 1:
        known = ", ".join(each.question_id for each in waiting) or "none"
        raise NotFound(f"{prefix!r} fits {len(fitting)} of the calls that wait: {known}")
    question = fitting[0]
    said = Answer(
        question.question_id, question.scope, question.key, question.arguments_hash, granted, getpass.getuser()
    )
    _write(folder / f"{question.question_id}.answer", said)
    return question


def answer_to(folder: Path, question: Question) -> bool | None:
    """What was answered: None as long as nothing was, False also for an answer to something else."""
    path = folder / f"{question.question_id}.answer"
    if not path.exists():
        return None
    answer = _read(path, Answer)
    return answer is not None and answer.granted and answer == _answer(question, granted=True, by=answer.by)


def withdraw(folder: Path, question_ids: Sequence[str]) -> None:
    """These questions are decided; nothing of them stays."""
    for question_id in question_ids:
        for suffix in (".json", ".answer"):
            (folder / f"{question_id}{suffix}").unlink(missing_ok=True)


def left_over(folder: Path) -> list[str]:
    """The ids of everything that lies in the folder."""
    return sorted({path.stem for suffix in ("json", "answer") for path in folder.glob(f"*.{suffix}")})


def _answer(question: Question, granted: bool, by: str = "") -> Answer:
    return Answer(
        question_id=question.question_id,
        scope=question.scope,
        key=question.key,
        arguments_hash=question.arguments_hash,
        granted=granted,
        by=by or getpass.getuser(),
    )


def _write(path: Path, record: Question | Answer) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(msgspec.json.encode(record))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _read(path: Path, kind: type[T]) -> T | None:
    """What lies in a file of this user that nobody else may write; None where it is none, or no such record."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        if not is_ours or found.st_size > _MOST_BYTES:
            return None
        try:
            return msgspec.json.decode(opened.read(), type=kind)
        except msgspec.MsgspecError:
            return None
