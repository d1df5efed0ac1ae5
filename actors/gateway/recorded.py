"""Verdicts that a replay takes from the record: what was answered from outside, approved, or decided by a clock.

They lie in `Episode.external` beside what the world itself asked outside, under "calls/STEP", each with the index of
its call. A replay that needs one that the record lacks asks nobody: that is a divergence, unless it is live.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.actors.environments.cassette import Cassette, External, load_cassette
from headrace.platform.contracts import CallVerdict
from headrace.platform.errors import ExternalDivergence
from headrace.platform.records.message import ToolCall

_CALLS = "calls/"


class RecordedVerdicts:
    """Those of one session. Steps are counted by the session, from 1."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {}
        self._given: dict[str, list[Any]] | None = None
        self._answered: dict[int, int] = {}
        self._live = False

    def load(self, session: object, external: External, live: bool) -> Cassette | None:
        """Answer from `external`, and let `session` answer from what of it is its own; see `load_cassette`."""
        rest = {step: asked for step, asked in external.items() if not step.startswith(_CALLS)}
        cassette = load_cassette(session, rest, live)
        if cassette is None and not rest:
            cassette = Cassette({}, live)
        if cassette is not None:
            self._given = {step: list(asked) for step, asked in external.items() if step.startswith(_CALLS)}
            self._live, self._answered = live, cassette.answered
            cassette.beside = self._release
        return cassette

    def keep(self, step: int, calls: Sequence[ToolCall], verdicts: Mapping[int, CallVerdict]) -> None:
        """Record those of a step's verdicts that a replay cannot come to by itself."""
        lasting = [
            {"index": index, "call": calls[index].name, "verdict": msgspec.to_builtins(verdict)}
            for index, verdict in verdicts.items()
            if verdict.lasting
        ]
        if lasting:
            self.kept[f"{_CALLS}{step}"] = lasting

    def find(self, step: int, calls: Sequence[ToolCall], outside: Callable[[], set[str]]) -> dict[int, CallVerdict]:
        """By index, the recorded verdicts of a step; none where this is no replay.

        Args:
            step: of the session.
            calls: of the step.
            outside: the tools that may not be asked for anew, as something outside would answer or act.

        Raises:
            ExternalDivergence: the record lacks one of those, and the replay is not live.
        """
        if self._given is None:
            return {}
        found = {
            entry["index"]: msgspec.convert(entry["verdict"], CallVerdict)
            for entry in self._given.get(f"{_CALLS}{step}", ())
            if entry["index"] < len(calls) and calls[entry["index"]].name == entry["call"]
        }
        missing = {call.name for index, call in enumerate(calls) if index not in found} & outside()
        if missing and not self._live:
            raise ExternalDivergence(
                f"step {step} calls {', '.join(sorted(missing))}, whose answer is not on the record; a replay does not"
                " ask for it again without --live"
            )
        if found:
            self._answered[step] = self._answered.get(step, 0) + len(found)
        return found

    def _release(self) -> None:
        self._given = None
