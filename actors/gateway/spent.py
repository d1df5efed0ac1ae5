"""What calls have used up that were allowed elsewhere: in a process that is gone, or on the record of a replay.

They are counted without a look at limits. Which of several grants covered a call is not known here: each limited one
that may have done so counts it, so that nothing is ever granted again (fail closed).
"""

from headrace.actors.gateway.decisions.asked import EpisodeState
from headrace.actors.gateway.decisions.capability import needed
from headrace.actors.gateway.decisions.patterns import fits
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import SideEffectTier


def count(state: EpisodeState, spec: ToolSpec, times: int = 1) -> None:
    """Count `times` allowed calls of a tool: calls, those of the tool, writes, money, and uses of grants."""
    state.calls += times
    state.calls_of[spec.name] = state.calls_of.get(spec.name, 0) + times
    state.money += spec.price * times
    if tier_of(spec) is not SideEffectTier.READ:
        state.writes += times
    capabilities = needed(spec)
    for index, grant in enumerate(state.grants):
        if grant.uses and grant.capability in capabilities and (not grant.tools or fits(spec.name, grant.tools)):
            state.uses[index] = state.uses.get(index, 0) + times
