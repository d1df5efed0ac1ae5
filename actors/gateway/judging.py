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
        wait_s: how long the calls of a turn may wait for their rate, together.
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

    async def slowly(self, asked: Sequence[Asked], session: Session) -> list[tuple[Asked, Denial | None]]:
        """The calls of a turn, each with its first denial; waits for approvals and for the rate. Raises as `now`."""
        state, left_s = session.state(self._clock()), self._wait_s
        decided: list[tuple[Asked, Denial | None]] = []
        for each in asked:
            denial = await self._agreed(each, state)
            if denial is None:
                wait_s, denial = self._spent(each, state, left_s)
                if wait_s > 0:
                    left_s -= wait_s
                    await asyncio.sleep(wait_s)
            decided.append((each, denial if denial is None else _counted(denial, each, state)))
        return decided

    async def _agreed(self, asked: Asked, state: EpisodeState) -> Denial | None:
        """The first denial of a call but for what it would use up."""
        if (denial := _first(_BEFORE_APPROVAL, asked, state)) is not None:
            return denial
        if tier.needs_approval(asked.spec):
            try:
                denial = await self._approvals.decide(asked, state)
            except ConfigError:
                raise
            except Exception as error:  # fail closed
                denial = _undecided(asked, state, "approvals", error)
            return denial
        return None

    def _spent(self, asked: Asked, state: EpisodeState, left_s: float) -> tuple[float, Denial | None]:
        """Use up what the call needs, and how long it has to wait then; or its denial, which uses up nothing."""
        now = self._clock()
        wait_s = budgets.wait_s(state, now, -1.0)  # to look at, as nobody can wait for so short
        if wait_s > left_s:
            told = f"too many calls at once; the next one is possible in {wait_s:.2g} s"
            return 0.0, Denial("budget:rate", told)
        if (denial := _first(_SPENDING, asked, state)) is not None:
            return 0.0, denial
        return budgets.wait_s(state, now), None


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
