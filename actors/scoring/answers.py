"""Scorers that compare the final answer with the task's.

The final answer is the content of the last assistant message, never a tool's output or an earlier message (case E3);
the right one is `task.data["answer"]`. They say 1 or 0 and nothing between. What cannot be judged, such as a task
without an answer, raises: that is the grader's fault and no reward (case E1).
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal

from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind, Role

_CURRENCY = "$¢£¥\u20a0-\u20cf"
_SIZE = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][-+]?\d{1,3})?"
# A minus, perhaps a currency sign, and a number that is not the tail of a word or of another number.
_NUMBER = re.compile(rf"(?P<minus>-[^\S\n]?)?(?:\\?[{_CURRENCY}][^\S\n]?)?(?<!\w)(?<!\w\.)(?P<size>{_SIZE})")
# Signs that are always a minus, and dashes that are one before a number.
_MINUS = re.compile(rf"[\u2212\u2796\ufe63\uff0d]|[\u2010-\u2013](?=\.?\d|\\?[{_CURRENCY}])")
_BULLET = re.compile(r"^[^\S\n]*-[^\S\n]+", re.MULTILINE)
_EVIDENCE_CHARS = 200


def final_answer(episode: Episode) -> str:
    """The content of the last assistant message, without surrounding white space; empty where there is none."""
    for turn in reversed(episode.turns):
        if turn.role is Role.ASSISTANT:
            return turn.content.strip()
    return ""


class AnswerScorer(ABC):
    """What the answer scorers share."""

    version: str

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """One outcome component: 1 for a right answer, 0 for a wrong one.

        Raises:
            ValueError: when the task has no answer that can be compared.
        """
        if "answer" not in task.data:
            raise ValueError(f"task {task.task_id} has no data['answer'] to compare with")
        answer = final_answer(episode)
        right = self._is_right(answer, task.data["answer"])
        return (RewardComponent(RewardKind.OUTCOME, float(right), evidence=f"answered {answer[:_EVIDENCE_CHARS]!r}"),)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """Each episode by itself."""
        return [self.score(task, episode) for episode in episodes]

    @abstractmethod
    def _is_right(self, answer: str, gold: object) -> bool:
        """Whether `answer` is right."""


class ExactScorer(AnswerScorer):
    """The answer is the gold text, surrounding white space aside.

    A gold number is compared as Python writes it. Gold true and false are answered by those words in whatever case.
    Nothing else can be compared: a null or a list is the fault of the task, and no reward.

    Args:
        ignore_case: compare without case.
    """

    def __init__(self, ignore_case: bool = False) -> None:
        self._ignore_case = ignore_case
        self.version = f"exact/2 ignore_case={ignore_case}"

    def _is_right(self, answer: str, gold: object) -> bool:
        if isinstance(gold, bool):
            return answer.casefold() == str(gold).casefold()
        if not (isinstance(gold, str | int) or (isinstance(gold, float) and math.isfinite(gold))):
            raise ValueError(f"the answer {gold!r:.80} is neither a text nor a number")
        wanted = str(gold).strip()
        return answer.casefold() == wanted.casefold() if self._ignore_case else answer == wanted


class NumericScorer(AnswerScorer):
    """The last number in the answer equals the gold number (case E4: 21 is not 1).

    A number may have commas between thousands, a fraction, an exponent and a currency sign. A minus before it, of
    whatever Unicode shape and with or without a space, belongs to it unless it subtracts (`10 - 7` ends with 7), joins
    (`item-7`) or begins one of several lines of a list.

    Args:
        absolute: largest difference that counts as equal.
        relative: the same, as a share of the gold number.
    """

    def __init__(self, absolute: float = 0.0, relative: float = 0.0) -> None:
        self._absolute, self._relative = Decimal(str(absolute)), Decimal(str(relative))
        self.version = f"numeric/2 absolute={absolute} relative={relative}"

    def _is_right(self, answer: str, gold: object) -> bool:
        wanted = _gold_number(gold)
        found = _last_number(answer)
        if found is None:
            return False
        return abs(found - wanted) <= max(self._absolute, self._relative * abs(wanted))


class RegexScorer(AnswerScorer):
    """The whole answer matches the gold pattern.

    Args:
        ignore_case: match without case.
    """

    def __init__(self, ignore_case: bool = False) -> None:
        self._flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
        self.version = f"regex/2 ignore_case={ignore_case}"

    def _is_right(self, answer: str, gold: object) -> bool:
        if not isinstance(gold, str):
            raise ValueError(f"the answer {gold!r:.80} is not a pattern; a pattern is a text")
        try:
            return re.fullmatch(gold, answer, self._flags) is not None
        except re.error as error:
            raise ValueError(f"the answer {gold!r} is not a pattern: {error}") from None


def _last_number(answer: str) -> Decimal | None:
    text = _MINUS.sub("-", answer)
    if len(_BULLET.findall(text)) > 1:
        text = _BULLET.sub("", text)
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    size = Decimal(last["size"].replace(",", ""))
    minus = last["minus"]
    return -size if minus and not _subtracts(text[: last.start()], minus) else size


def _subtracts(before: str, minus: str) -> bool:
    """Whether the `minus` that follows `before` stands between two things, rather than at the start of one."""
    stem = before.rstrip(" \t\u00a0\u202f")
    if stem == before:
        return re.search(r"[\w)\]}%]\Z", stem) is not None
    if minus == "-":
        return re.search(r"[\d%]\Z", stem) is not None
    return re.search(r"(?:[\d)\]}%]|(?<!\w)\w)\Z", stem) is not None  # a letter by itself is a name, as in "x - 7"


def _gold_number(gold: object) -> Decimal:
    text = _MINUS.sub("-", str(gold).strip())
    match = _NUMBER.fullmatch(text.removeprefix("+"))
    if match is None or not isinstance(gold, str | int | float) or isinstance(gold, bool):
        raise ValueError(f"the answer {gold!r:.80} is not a number")
    size = Decimal(match["size"].replace(",", ""))
    return -size if match["minus"] else size
