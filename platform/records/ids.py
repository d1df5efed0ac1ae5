"""Who is who: slots, attempts and episodes (P1).

A *slot* is (run, group, sample) and trains at most once. An *attempt* is one try at a slot; an episode is the record
of one attempt and bears its id.
"""

import msgspec

from headrace.platform.records.status import Purpose

_LETTER = {Purpose.TRAIN: "t", Purpose.EVAL: "e", Purpose.SFT: "s", Purpose.REPLAY: "r"}
_PURPOSE = {letter: purpose for purpose, letter in _LETTER.items()}


class AttemptId(msgspec.Struct, frozen=True, order=True, gc=False):
    """One try at one slot, and the id of the episode that it plays.

    `group` is dense and unique within (run, purpose): for training it is the dispatch sequence (P10). Text form:
    `RUN.t12.3.0`, that is run, purpose and group, sample, attempt.
    """

    run: str
    group: int
    sample: int
    attempt: int = 0
    purpose: Purpose = Purpose.TRAIN

    def __str__(self) -> str:
        return f"{self.run}.{_LETTER[self.purpose]}{self.group}.{self.sample}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> "AttemptId":
        """The id whose `str()` is `text`.

        Raises:
            ValueError: when `text` is not such an id.
        """
        try:
            run, group, sample, attempt = text.rsplit(".", 3)
            return cls(run, int(group[1:]), int(sample), int(attempt), _PURPOSE[group[0]])
        except (ValueError, KeyError, IndexError):
            raise ValueError(f"{text!r} is not an episode id; one looks like 'lookup-1f3a.t12.3.0'") from None

    def next_attempt(self) -> "AttemptId":
        """The attempt that follows this one in the same slot."""
        return AttemptId(self.run, self.group, self.sample, self.attempt + 1, self.purpose)
