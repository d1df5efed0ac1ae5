"""The decisions on one call, in their order; each is a file of its own under `decisions`.

A decision that raises is a no, and ends the episode: fail closed. What needs no waiting is decided by a plain call.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.actors.gateway.decisions import budgets, capability, rules, schema, taint, tier
from headrace.actors.gateway.decisions.approvals import Approvals
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.sessions import Session
from headrace.actors.gateway.shown import UNSENDABLE, is_strong
from headrace.platform.errors import ConfigError

UNDECIDED = "gateway:error"
_log = logging.getLogger(__name__)
_Check = Callable[[Asked, EpisodeState], Denial | None]
_BEFORE_APPROVAL: tuple[_Check, ...] = (schema.check, capability.check, rules.check, taint.check, tier.check)
_SPENDING: tuple[_Check, ...] = (budgets.check,)


class Judge:
    """Decides on calls.

    Args:
        approvals: asked about what is irreversible.
        wait_s: how long a call may wait for its rate.
        clock: monotonic seconds.
    """

    def __init__(self, approvals: Approvals, wait_s: float, clock: Callable[[], float]) -> None:
        self._approvals, self._wait_s, self._clock = approvals, wait_s, clock

    @staticmethod
    def waits(session: Session, asked: Sequence[Asked]) -> bool:
        """Whether anything has to be waited for: an approval, a rate, a disk, or a tool that is performed here."""
        if session.learned.policy.budgets.calls_per_s > 0:
            return True
        return any(each.here or is_strong(each.spec) for each in asked)

    def now(self, asked: Asked, session: Session) -> Denial | None:
        """The first denial of a call that nothing has to be waited for. Raises ConfigError for an impossible tool."""
        state = session.begun or session.state(self._clock())
        denial = _first(_BEFORE_APPROVAL, asked, state) or _first(_SPENDING, asked, state)
        return denial if denial is None else _counted(denial, asked, state)

    async def slowly(self, asked: Asked, session: Session) -> Denial | None:
        """The first denial of any call; waits for an approval and for the call's turn. Raises as `now`."""
        state = session.state(self._clock())
        denial = await self._slowly(asked, state)
        return denial if denial is None else _counted(denial, asked, state)

    async def _slowly(self, asked: Asked, state: EpisodeState) -> Denial | None:
        if (denial := _first(_BEFORE_APPROVAL, asked, state)) is not None:
            return denial
        if tier.needs_approval(asked.spec):
            try:
                denial = await self._approvals.decide(asked, state)
            except ConfigError:
                raise
            except Exception as error:  # fail closed
                denial = _undecided(asked, state, "approvals", error)
            if denial is not None:
                return denial
        if (denial := _first(_SPENDING, asked, state)) is not None:
            return denial
        if state.policy.budgets.calls_per_s > 0:
            wait_s = budgets.wait_s(state, self._clock(), self._wait_s)
            if wait_s > self._wait_s:
                return Denial("budget:rate", f"too many calls at once; the next one is possible in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
        return None


def _first(checks: Sequence[_Check], asked: Asked, state: EpisodeState) -> Denial | None:
    """The first denial of some decisions. Raises ConfigError."""
    check: _Check | None = None
    try:
        if UNSENDABLE in asked.call.arguments:
            told = "the arguments are no JSON object, or hold a number or a character that JSON cannot carry"
            return Denial("schema:not_json", told, True)
        for check in checks:
            if (denial := check(asked, state)) is not None:
                return denial
    except ConfigError:
        raise
    except Exception as error:  # fail closed
        return _undecided(asked, state, check.__module__.rpartition(".")[2] if check is not None else "form", error)
    return None


def _counted(denial: Denial, asked: Asked, state: EpisodeState) -> Denial:
    """The denial, after a look at whether the call would have let untrusted text leave."""
    try:
        taint.count_attempt(denial, asked, state)
    except Exception as error:  # fail closed
        return _undecided(asked, state, "taint", error)
    return denial


def _undecided(asked: Asked, state: EpisodeState, decision: str, error: Exception) -> Denial:
    _log.error("%s %s: no decision by %s", state.scope, asked.key, decision, exc_info=error)
    return Denial(UNDECIDED, f"the gateway could not decide ({decision}: {type(error).__name__})")
