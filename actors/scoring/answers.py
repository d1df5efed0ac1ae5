"""Scorers that compare the final answer with the task's.

The final answer is the content of the last assistant message, never a tool's output or an earlier message (case E3);
the right one is `task.data["answer"]`. They say 1 or 0 and nothing between. What cannot be judged, such as a task
without an answer, raises: that is the grader's fault and no reward (case E1).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind, Role

# A number that is not the tail of a word or of another number; a minus belongs to it unless it subtracts.
_NUMBER = re.compile(r"(?<![\w.])(?:(?<!\d )-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
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

    Args:
        ignore_case: compare without case.
    """

    def __init__(self, ignore_case: bool = False) -> None:
        self._ignore_case = ignore_case
        self.version = f"exact/1 ignore_case={ignore_case}"

    def _is_right(self, answer: str, gold: object) -> bool:
        wanted = str(gold).strip()
        return answer.casefold() == wanted.casefold() if self._ignore_case else answer == wanted


class NumericScorer(AnswerScorer):
    """The last number in the answer equals the gold number (case E4: 21 is not 1).

    Args:
        absolute: largest difference that counts as equal.
        relative: the same, as a share of the gold number.
    """

    def __init__(self, absolute: float = 0.0, relative: float = 0.0) -> None:
        self._absolute, self._relative = Decimal(str(absolute)), Decimal(str(relative))
        self.version = f"numeric/1 absolute={absolute} relative={relative}"

    def _is_right(self, answer: str, gold: object) -> bool:
        wanted = _gold_number(gold)
        numbers = _NUMBER.findall(answer)
        if not numbers:
            return False
        found = Decimal(numbers[-1].replace(",", ""))
        return abs(found - wanted) <= max(self._absolute, self._relative * abs(wanted))


class RegexScorer(AnswerScorer):
    """The whole answer matches the gold pattern.

    Args:
        ignore_case: match without case.
    """

    def __init__(self, ignore_case: bool = False) -> None:
        self._flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
        self.version = f"regex/1 ignore_case={ignore_case}"

    def _is_right(self, answer: str, gold: object) -> bool:
        try:
            return re.fullmatch(str(gold), answer, self._flags) is not None
        except re.error as error:
            raise ValueError(f"the answer {gold!r} is not a pattern: {error}") from None


def _gold_number(gold: object) -> Decimal:
    try:
        number = Decimal(str(gold).strip().replace(",", ""))
    except InvalidOperation:
        number = Decimal("NaN")
    if isinstance(gold, bool) or not number.is_finite():
        raise ValueError(f"the answer {gold!r} is not a number")
    return number
