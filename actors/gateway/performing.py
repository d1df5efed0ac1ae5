"""The performing of a call by the gateway itself: its deadline, and what becomes of its failures.

What a tool answers, its errors included, is an answer. A call that a rule ends on its way was allowed and is counted
as blocked: what it did stays, and the model is told. A tool that is too slow or gone is an observation where the call
only reads (P27), and leaves doubt where it does more (P25).
"""

import asyncio
import logging

import msgspec

from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.actors.gateway.perform.performers import Performers, Refused, Stopped, ToolFailed
from headrace.actors.gateway.shown import denied, shown
from headrace.platform.contracts import ToolOutput, ToolResult
from headrace.platform.errors import GatewayAway, InDoubt
from headrace.platform.records.status import SideEffectTier

_log = logging.getLogger(__name__)
_READ = SideEffectTier.READ


class Performing:
    """Performs calls.

    Args:
        performers: know the tools.
        deadline_s: how long one call may take.
    """

    def __init__(self, performers: Performers, deadline_s: float) -> None:
        self._performers, self._deadline_s = performers, deadline_s

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolResult:
        """Perform an allowed call; what the model may see of it. It may still be denied by what the tool knows, or be
        ended by a rule on its way: then the result has that `rule`.

        Raises:
            InDoubt: it is more than a read, and nobody knows how it ended.
            GatewayAway: a read that could not be made, through no fault of the call's.
        """
        name = asked.call.name
        try:
            async with asyncio.timeout(self._deadline_s):
                given = await self._performers.perform(asked, state)
        except Refused as refused:
            return denied(refused.denial)
        except Stopped as stopped:  # its text may be from outside, so that it is shown as output
            ended = shown(asked.call, asked.spec, state.policy, ToolOutput(f"blocked: {stopped}", ok=False))
            return msgspec.structs.replace(ended, rule=stopped.denial.rule)
        except ToolFailed as error:
            given = ToolOutput(f"error: {error}", ok=False)
        except TimeoutError:
            if tier_of(asked.spec) is not _READ:
                raise InDoubt(f"{name} did not end within {self._deadline_s:g} s") from None
            given = ToolOutput(f"error: {name} took longer than {self._deadline_s:g} s", ok=False)  # P27
        except Exception as error:
            _log.exception("%s %s: %s failed", state.scope, asked.key, name)
            told = f"{name}: {type(error).__name__}: {error}"
            raise (GatewayAway if tier_of(asked.spec) is _READ else InDoubt)(told) from error
        return shown(asked.call, asked.spec, state.policy, given)

    async def end(self, scope: str) -> None:
        """An episode is over, and with it what was held for it alone."""
        await self._performers.end(scope)
