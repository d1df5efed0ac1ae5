"""Calls that wait for somebody's word, as files: what the gateway writes and `headrace approvals` answers.

::

    HOME/approvals/ID.json      0600: the call, written by the gateway, locked while it waits, gone once it is decided
    HOME/approvals/ID.answer    0600: yes or no to exactly that call

An answer names the question's id, the session's scope, the call's key, and the hash of tool and arguments as they were
shown. Whoever asked compares all of them with what it holds in memory, and an id is never used again: an answer to
another call, copied or kept, is a no. A question without the lock is what a process that is gone has left: it is not
shown, and cannot be answered.
"""

import fcntl
import getpass
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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


class Asking:
    """A question that somebody waits on, from `write` to `end`, which may be called while another thread writes."""

    def __init__(self, folder: Path, question: Question) -> None:
        self._folder, self._question = folder, question
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._is_over = False

    def write(self) -> None:
        """Write it down, unless it is over already. Raises OSError."""
        with self._lock:
            if not self._is_over:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = _write(self._folder / f"{self._question.question_id}.json", self._question)

    def answer(self) -> bool | None:
        """See `answer_to`."""
        return answer_to(self._folder, self._question)

    def end(self) -> None:
        """It is decided, or nobody waits any more; nothing of it stays. Safe to call twice."""
        with self._lock:
            self._is_over = True
            withdraw(self._folder, (self._question.question_id,))
            if self._file is not None:
                self._file.close()


def questions(folder: Path, now_s: float) -> list[Question]:
    """Those that somebody waits on and that can still be answered, the oldest first."""
    found = [_read(path, Question) for path in folder.glob("*.json") if _is_waited_on(path)]
    open_ones = [each for each in found if each is not None and each.deadline_s > now_s]
    return sorted(open_ones, key=lambda each: each.asked_at_s)


def reply(folder: Path, prefix: str, granted: bool, now_s: float) -> Question:
    """Answer the question whose id begins with `prefix`; which one that was.

    Raises:
        NotFound: there is none, or several, or it was over before it was answered.
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
    answer = folder / f"{question.question_id}.answer"
    _write(answer, said).close()
    if answer.exists() and not (folder / f"{question.question_id}.json").exists():
        answer.unlink(missing_ok=True)
        raise NotFound(f"the call {question.question_id} does not wait any more")
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
        for suffix in (".answer", ".json"):  # in this order: an answer without a question has come too late
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


def _write(path: Path, record: Question | Answer) -> BinaryIO:
    """The file, locked as long as it is open."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    opened = os.fdopen(file, "wb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        left = memoryview(msgspec.json.encode(record))
        while left:
            left = left[opened.write(left) :]
        beside.replace(path)
    except BaseException:
        opened.close()
        raise
    finally:
        beside.unlink(missing_ok=True)
    return opened


def _is_waited_on(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


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
