"""The answers to the calls of one turn, put together from whoever gave them, in the order of the calls."""

import time
from collections.abc import Sequence

import msgspec

from headrace.platform.contracts import CallVerdict, ToolOutput, ToolResult
from headrace.platform.errors import GatewayAway
from headrace.platform.hashing import hash_text
from headrace.platform.records.message import CallOutcome, HashPair, Message, StepResult, ToolCall
from headrace.platform.records.status import Role, Status

_TOOL, _OK, _INVALID = Role.TOOL, Status.OK, Status.MODEL_INVALID_ACTION
_UNANSWERED = ToolResult("")


class Answers:
    """Those of one turn, filled in as they come.

    `allowed` are the indices of the calls that whoever plays the episode has to perform.
    """

    def __init__(self, calls: Sequence[ToolCall], verdicts: Sequence[CallVerdict], began: float) -> None:
        self._calls, self._verdicts, self._began = calls, verdicts, began
        self._results = [verdict.result or _UNANSWERED for verdict in verdicts]
        self.allowed = [index for index, verdict in enumerate(verdicts) if verdict.result is None]
        self._times = [(0.0, time.monotonic() - began)] * len(calls)
        self._outputs: dict[int, ToolOutput] = {}
        self._own: Sequence[int] = ()
        self._messages: dict[int, tuple[Message, ...]] = {}  # of the environment, by the call that they answer

    def perform(self, index: int, output: ToolOutput) -> None:
        """What a call gave that was performed in the box."""
        self._outputs[index] = output
        self._times[index] = (self._times[index][1], time.monotonic() - self._began)

    def take(self, indices: Sequence[int], messages: Sequence[Message]) -> None:
        """What the environment answered to the calls `indices`: a tool's message for each, by their ids or in order;
        what else it said goes with the last of them. Where it did not answer each, all of it answers the first."""
        self._own = indices
        told = self._in_order(indices, [message for message in messages if message.role is _TOOL])
        if len(told) == len(indices):
            self._messages = {index: (message,) for index, message in zip(indices, told, strict=True)}
            beside = [message for message in messages if message.role is not _TOOL]
            self._messages[indices[-1]] += tuple(beside)
        else:
            self._messages = {index: tuple(messages) if index == indices[0] else () for index in indices}
        for index in indices:
            self.perform(index, ToolOutput("\n".join(message.content for message in self._messages[index])))

    def outputs(self, indices: Sequence[int]) -> list[ToolOutput]:
        """Of some of the allowed calls, as they came."""
        return [self._outputs[index] for index in indices]

    def settle(self, indices: Sequence[int], results: Sequence[ToolResult]) -> None:
        """The same as the model may see them.

        Raises:
            GatewayAway: there are more or fewer than there were outputs.
        """
        if len(results) != len(indices):
            raise GatewayAway(f"the gateway settled {len(results)} of {len(indices)} calls")
        for index, result in zip(indices, results, strict=True):
            self._results[index] = result

    @property
    def not_own(self) -> list[int]:
        """The calls that were made, though not by the environment."""
        made = [index for index, result in enumerate(self._results) if result.decision == "allow"]
        return [index for index in made if index not in self._own]

    def outcomes(self) -> tuple[CallOutcome, ...]:
        """What the record keeps of each call."""
        return tuple(
            [
                CallOutcome(
                    decision=result.decision,
                    rule=result.rule,
                    tier=verdict.tier,
                    source=result.source,
                    taint=verdict.taint,
                    result_hash=hash_text(result.content).canonical,
                    start_s=start_s,
                    end_s=end_s,
                )
                for verdict, result, (start_s, end_s) in zip(self._verdicts, self._results, self._times, strict=True)
            ]
        )

    def result(self, step: StepResult | None, state: HashPair) -> StepResult:
        """The whole turn's. `step` is what the environment answered, None where it was not asked: then the state is
        still `state`."""
        base = step if step is not None else StepResult(state_hash=state)
        told = [message for index in range(len(self._calls)) for message in self._told(index)]
        messages = [message for message in told if message.role is _TOOL]
        messages += [message for message in told if message.role is not _TOOL]
        invalid = base.status is _OK and any(result.invalid for result in self._results)
        others = len(self.not_own)
        cost = msgspec.structs.replace(base.cost, tool_calls=base.cost.tool_calls + others) if others else base.cost
        return msgspec.structs.replace(
            base,
            messages=tuple(messages),
            status=_INVALID if invalid else base.status,
            cost=cost,
            calls=self.outcomes(),
            taint=",".join(sorted({each.source for each in self._results if each.source and not each.trusted})),
        )

    def _told(self, index: int) -> Sequence[Message]:
        """What the model reads of one call: the environment's own words, unless the gateway had to change them."""
        result, own = self._results[index], self._messages.get(index)
        if own is None:
            return (Message(_TOOL, result.content, tool_call_id=self._calls[index].call_id),)
        if not own or result.content == self._outputs[index].content:
            return own
        return (msgspec.structs.replace(own[0], content=result.content),)

    def _in_order(self, indices: Sequence[int], told: list[Message]) -> list[Message]:
        ids = [self._calls[index].call_id for index in indices]
        by_id = {message.tool_call_id: message for message in told}
        if len(by_id) == len(told) and set(by_id) == set(ids) and len(set(ids)) == len(ids):
            return [by_id[each] for each in ids]
        return told
