"""The part of the ledger suite about a server that restarts and has lost nothing (P8, P11, P12).

The harness must be able to do that to its server: `mark`, `rewind`, `wipe` and `restart`.
"""

from collections.abc import Awaitable, Callable, Sequence

from headrace.platform.errors import Fenced, LedgerRewound
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    LedgerHarness,
    limits,
    numbers,
    raises,
)


async def a_restart_is_noticed_by_everybody(factory: LedgerFactory) -> None:
    """P8: nothing goes on and nothing changes until somebody has looked; looking is allowed."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        before = await h.stats()
        await restart(h)
        for call in _calls(h, fence):
            await raises(LedgerRewound, call())
        stats = await h.stats()
        assert stats.suspect
        assert (stats.dispatched, stats.fates, stats.fence) == (before.dispatched, before.fates, before.fence)
        assert not await h.ledger.confirm(0, "another content")
        assert not await h.ledger.confirm(7, "content-7")
        assert (await h.stats()).suspect
        assert await h.ledger.confirm(0, "content-0")
        assert not (await h.stats()).suspect
        assert numbers(await h.ledger.lease(fence, 0, 0, 2)) == [0, 1], "the learner is still the learner"


async def leases_get_a_fresh_term(factory: LedgerFactory) -> None:
    """P12: the time that the server was away is nobody's fault: workers and learner keep what they had."""
    async with factory(limits(dispatch_lease_s=10.0, learner_lease_s=10.0, learner_term_s=10.0)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        await h.ledger.lease(fence, 0, 0, 1)
        await h.admit(0, 1)
        await restart(h)
        await h.advance(30.0)
        assert await h.ledger.confirm(0, "content-0")
        await h.advance(9.0)
        stats = await h.stats()
        assert (stats.groups_leased, stats.groups_waiting, stats.learner_silent_s) == (1, 0, 9.0)
        await raises(Fenced, h.ledger.acquire_learner("second"))
        await h.advance(2.0)
        stats = await h.stats()
        assert (stats.groups_leased, stats.groups_waiting) == (0, 1), "one fresh term, no more"


async def a_server_that_lost_nothing_goes_on(factory: LedgerFactory) -> None:
    """P8: the state at the last reply is the state of the ledger; a brand-new ledger is not suspect."""
    async with factory(limits()) as h:
        assert not (await h.stats()).suspect
        fence = await h.begin()
        token = await mark(h)
        await rewind(h, token)
        assert not (await h.stats()).suspect
        await h.ledger.stage(fence)


async def what_was_acknowledged_is_durable(factory: LedgerFactory) -> None:
    """P11: the suite's ledgers are on durable servers."""
    async with factory(limits()) as h:
        await h.begin()
        assert await h.ledger.durable(5.0)


def _calls(h: LedgerHarness, fence: int) -> Sequence[Callable[[], Awaitable[object]]]:
    """One call of every method that needs a ledger that can be trusted."""
    ledger = h.ledger
    return [
        lambda: ledger.admit(0, 2, 1, "worker"),
        lambda: ledger.renew("worker", [0]),
        lambda: ledger.disown("worker"),
        lambda: ledger.put([h.done(0, 0, 1.0, 0)]),
        lambda: ledger.allow("shop", ["1"]),
        lambda: ledger.lease(fence, 0, 0, 1),
        lambda: ledger.at_risk(fence, 0, 0, 1),
        lambda: ledger.extend(fence, []),
        lambda: ledger.release(fence, []),
        lambda: ledger.drop(fence, [], "nan"),
        lambda: ledger.acquire_learner("first"),
        lambda: ledger.stage(fence),
        lambda: ledger.commit(h.request(fence, 1, 0)),
        lambda: ledger.settle(fence, 0),
        lambda: ledger.rollback(fence, 0),
        lambda: ledger.watch_head(None, 0.0),
        lambda: ledger.fates(0, 1),
        lambda: ledger.stop("end"),
    ]


async def mark(h: LedgerHarness) -> object:
    """A copy of the server's state, for `rewind`."""
    assert h.mark is not None, "the harness cannot take a copy of the server's state"
    return await h.mark()


async def rewind(h: LedgerHarness, token: object) -> None:
    """Put the server back to a copy of its state."""
    assert h.rewind is not None, "the harness cannot put the server back"
    await h.rewind(token)


async def wipe(h: LedgerHarness) -> None:
    """Empty the server."""
    assert h.wipe is not None, "the harness cannot empty the server"
    await h.wipe()


async def restart(h: LedgerHarness) -> None:
    """Restart the server; it loses nothing."""
    assert h.restart is not None, "the harness cannot restart the server"
    await h.restart()


RESTART_CASES: tuple[LedgerCase, ...] = (
    a_restart_is_noticed_by_everybody,
    leases_get_a_fresh_term,
    a_server_that_lost_nothing_goes_on,
    what_was_acknowledged_is_durable,
)
"""Part of `LEDGER_SUITE`."""
