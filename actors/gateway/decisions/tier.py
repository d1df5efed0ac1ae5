"""How far a call reaches: reads run, writes spend a budget, and what cannot be undone is asked about (`approvals`).

A tool reaches at least as far as its capability says: a recipe that mounts one as irreversible need not name a tier.
"""

from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

_READ, _WRITE, _IRREVERSIBLE = SideEffectTier.READ, SideEffectTier.WRITE, SideEffectTier.IRREVERSIBLE


def tier_of(spec: ToolSpec) -> SideEffectTier:
    """The side-effect tier of a tool."""
    if spec.capability is Capability.IRREVERSIBLE:
        return _IRREVERSIBLE
    return _WRITE if spec.tier is _READ and spec.capability is Capability.WRITE else spec.tier


def needs_approval(spec: ToolSpec) -> bool:
    """Whether somebody has to approve of each call."""
    return spec.tier is _IRREVERSIBLE or spec.capability is Capability.IRREVERSIBLE


def check(asked: Asked, state: EpisodeState) -> Denial | None:
    """Decide whether another call with side effects may be made. Spends nothing; see `spend`."""
    most = state.policy.budgets.writes
    if not most or state.writes < most or tier_of(asked.spec) is _READ:
        return None
    return Denial("tier:writes", f"all {most} calls with side effects are made")


def spend(asked: Asked, state: EpisodeState) -> None:
    """Count the call."""
    if tier_of(asked.spec) is not _READ:
        state.writes += 1
