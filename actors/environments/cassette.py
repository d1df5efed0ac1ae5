"""The cassette: what a session asked of services outside its world, and what they answered, by step.

Owns recording and answering. A session records as it plays; one that was given a cassette answers from it, so that a
re-execution (`restore`, `clone`, a replay) asks nobody again. What a world answers from a cassette is evidence of the
past and not of the world at hand: `answered` counts it, which is the fidelity gap of a replay. A request that the
cassette does not know at that step is a divergence, never in silence a call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.platform.errors import EnvironmentFault, ExternalDivergence
from headrace.platform.hashing import canonical_text

External = Mapping[str, list[Any]]
"""Step ("0" is the reset) to its requests in order, each `{"request": …, "response": …}`, JSON-safe."""


class Cassette:
    """One session's. Steps are counted by the session: 0 is the reset, n the n-th action that it took.

    Args:
        given: what to answer from; None where everything is asked for.
        live: whether what `given` does not know may be asked for.
    """

    def __init__(self, given: External | None = None, live: bool = False) -> None:
        self.recorded: dict[str, list[Any]] = {}
        self.answered: dict[int, int] = {}
        """How many answers came from the cassette, by step."""
        self.missing: dict[int, list[str]] = {}
        """The requests that it did not know, by step, as people read them."""
        self.accidental: dict[int, list[tuple[str, str]]] = {}
        """By step, the recorded and the present request where only something accidental tells them apart."""
        self.beside: Callable[[], None] | None = None
        """Called with `release`: somebody else answers from the record, too."""
        self._given = given
        self.live = live
        self._step = 0
        self._unused: list[Any] = []

    def __copy__(self) -> "Cassette":
        """One that stands where this one stands."""
        twin = Cassette(self._given, self.live)
        twin.recorded = copied(self.recorded)
        twin.answered, twin.missing = dict(self.answered), copied(self.missing)
        twin.accidental = copied(self.accidental)
        twin._step, twin._unused = self._step, list(self._unused)
        return twin

    def begin(self, step: int) -> None:
        """What follows is asked for in `step`; what an earlier try of it, or later steps, left is forgotten."""
        self._step = step
        if self._given is not None:
            self._unused = list(self._given.get(str(step), ()))
            for counts in (self.answered, self.missing, self.accidental):
                for number in [number for number in counts if number >= step]:
                    del counts[number]
        if self.recorded:
            for key in [key for key in self.recorded if int(key) >= step]:
                del self.recorded[key]

    def find(self, request: Any) -> tuple[bool, Any]:
        """Whether the cassette answers `request`, and its answer: the first one of this step not yet given to an equal
        request; else to one from which only something accidental (a time, a path) tells it, which is noted.

        Raises:
            ExternalDivergence: it does not know the request here, and nobody may be asked.
        """
        if (index := self._place(request)) is not None:
            entry = self._unused.pop(index)
            self.answered[self._step] = self.answered.get(self._step, 0) + 1
            self.keep(request, entry["response"])
            return True, plain(entry["response"], "a response from the cassette")
        if self._given is None:
            return False, None
        told = _short(request)
        self.missing.setdefault(self._step, []).append(told)
        if self.live:
            return False, None
        left = self.unused()
        expected = f"there it asks for {left[0]}" if left else "nothing more is there"
        raise ExternalDivergence(f"step {self._step} asks for {told}, which is not on the cassette; {expected}")

    def _place(self, request: Any) -> int | None:
        """Which of what is left of this step answers it."""
        if not self._unused:
            return None
        wanted, known = _text(request), [_text(entry["request"]) for entry in self._unused]
        if wanted in known:
            return known.index(wanted)
        canonical = canonical_text(wanted)
        for index, text in enumerate(known):
            if canonical_text(text) == canonical:
                self.accidental.setdefault(self._step, []).append((text, wanted))
                return index
        return None

    def keep(self, request: Any, response: Any) -> None:
        """Record an answer of the present step."""
        self.recorded.setdefault(str(self._step), []).append({"request": request, "response": response})

    def release(self) -> None:
        """From the next step on, answer nothing: whoever was re-executed goes on by itself."""
        self._given, self._unused = None, []
        if self.beside is not None:
            self.beside()

    def unknown(self) -> list[str]:
        """What the present step asked for and the cassette did not know."""
        return self.missing.get(self._step, [])

    def unused(self) -> list[str]:
        """What was asked for at this step when it was recorded, and is not now, as people read it."""
        return [_short(entry["request"]) for entry in self._unused]


def load_cassette(session: object, external: External, live: bool = False) -> Cassette | None:
    """Make a session, or the one behind what it is wrapped in, answer from `external` what it asks for outside; None
    where it cannot."""
    while session is not None and not hasattr(session, "load_cassette"):
        session = getattr(session, "inner", None)
    cassette: Cassette | None = session.load_cassette(external, live) if session is not None else None
    return cassette


def copied(lists: Mapping[Any, list[Any]]) -> dict[Any, list[Any]]:
    """A copy whose lists are its own."""
    return {key: list(items) for key, items in lists.items()}


def plain(value: Any, what: str) -> Any:
    """A copy of `value` as it is after a hop: a tuple is a list, a key a text.

    Raises:
        EnvironmentFault: it is not JSON-safe; `what` says whose value it is.
    """
    try:
        data = msgspec.json.encode(value)
        msgspec.msgpack.encode(value)  # as it is stored: whole numbers have 64 bits
    except Exception as error:  # case X16: what no hop can carry is refused at the first
        raise EnvironmentFault(f"{what} is not JSON: {error}", transient=False) from error
    return msgspec.json.decode(data)


def _text(request: Any) -> str:
    return msgspec.json.encode(request, order="deterministic").decode()


def _short(request: Any) -> str:
    text = _text(request)
    return text if len(text) <= 120 else f"{text[:117]}..."
