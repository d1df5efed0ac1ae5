"""The model of the ledger as a Hypothesis state machine. Needs Hypothesis, so nothing imports it by default.

Make a test of it::

    TestMemory = ledger_machine([memory_ledger], MODEL_LIMITS).TestCase

With several factories every step is taken on all of their ledgers, which must answer alike.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.testing.conformance.ledger_harness import LedgerFactory
from headrace.platform.testing.conformance.ledger_model import (
    LEARNER_KINDS,
    LOSS_KINDS,
    MODEL_LIMITS,
    WORKER_KINDS,
    Step,
    begin,
    end,
    take,
)
from headrace.platform.testing.conformance.ledger_player import Player

_small = st.integers(0, 5)


class LedgerMachine(RuleBasedStateMachine):
    """Steps of workers, of the learner, and losses, in any order. Use `ledger_machine`."""

    factories: ClassVar[Sequence[LedgerFactory]] = ()
    chosen: ClassVar[LedgerLimits] = MODEL_LIMITS

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._players = self._runner.run(self._open())

    async def _open(self) -> list[Player]:
        harnesses = [await self._stack.enter_async_context(factory(self.chosen)) for factory in self.factories]
        players = [Player(harness, self.chosen) for harness in harnesses]
        for player in players:
            await begin(player)
        return players

    @rule(kind=st.sampled_from(WORKER_KINDS), a=_small, b=_small, c=_small)
    def a_worker(self, kind: str, a: int, b: int, c: int) -> None:
        """A worker's step."""
        self._runner.run(self._take(Step(kind, a, b, c)))

    @rule(kind=st.sampled_from(LEARNER_KINDS), a=_small, b=_small, c=_small)
    def a_learner(self, kind: str, a: int, b: int, c: int) -> None:
        """A step of the learner, with something new to learn from before it."""
        for step in (Step("finish", b, c, 0), Step(kind, a, b, c)):
            self._runner.run(self._take(step))

    @rule(kind=st.sampled_from(LOSS_KINDS), a=_small, b=_small, c=_small)
    def a_loss(self, kind: str, a: int, b: int, c: int) -> None:
        """Something that happens to the server, and what the driver does about it."""
        self._runner.run(self._take(Step(kind, a, b, c)))

    async def _take(self, step: Step) -> None:
        first, *others = [await take(player, step) for player in self._players]
        for other in others:
            assert other == first, f"{step}: expected {first}, found {other}"

    async def _close(self) -> None:
        try:
            for player in self._players:
                await end(player)
        finally:
            await self._stack.aclose()

    def teardown(self) -> None:
        """Close the books of every ledger."""
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()


def ledger_machine(factories: Sequence[LedgerFactory], chosen: LedgerLimits = MODEL_LIMITS) -> type[LedgerMachine]:
    """A machine that plays on a ledger of each factory, under the limits `chosen`."""

    class Machine(LedgerMachine):
        pass

    Machine.factories, Machine.chosen = tuple(factories), chosen
    return Machine
