"""How far a call reaches, and the budget of calls with side effects."""

import pytest

from headrace.actors.gateway.decisions import budgets, tier
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.policy import CallBudgets, Policy
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, SideEffectTier

TIERS = SideEffectTier


def state_of(writes):
    grants = tuple(Grant(each) for each in Capability)
    return EpisodeState("e/0#1", Policy(budgets=CallBudgets(writes=writes)), {}, frozenset(), grants, 0.0)


def asked_of(spec):
    return Asked(ToolCall(spec.name), spec, "e/0/0/0", here=False)


@pytest.mark.parametrize(
    ("capability", "declared", "reaches"),
    [
        (Capability.READ, TIERS.READ, TIERS.READ),
        (Capability.NETWORK, TIERS.READ, TIERS.READ),
        (Capability.WRITE, TIERS.READ, TIERS.WRITE),
        (Capability.READ, TIERS.WRITE, TIERS.WRITE),
        (Capability.IRREVERSIBLE, TIERS.READ, TIERS.IRREVERSIBLE),
        (Capability.NETWORK, TIERS.IRREVERSIBLE, TIERS.IRREVERSIBLE),
    ],
)
def test_a_tool_reaches_at_least_as_far_as_its_capability(capability, declared, reaches):
    spec = ToolSpec("t", capability=capability, tier=declared)
    assert tier.tier_of(spec) is reaches
    assert tier.needs_approval(spec) == (reaches is TIERS.IRREVERSIBLE)


def test_reads_run_whatever_was_written():
    state = state_of(writes=1)
    state.writes = 10
    assert tier.check(asked_of(ToolSpec("get")), state) is None


@pytest.mark.parametrize("declared", [TIERS.WRITE, TIERS.IRREVERSIBLE])
def test_writes_spend_a_budget(declared):
    state, asked = state_of(writes=2), asked_of(ToolSpec("put", tier=declared))
    for _ in range(2):
        assert tier.check(asked, state) is None
        assert budgets.check(asked, state, 0.0) is None
    assert tier.check(asked, state).rule == "tier:writes"
    assert "all 2 calls with side effects are made" in tier.check(asked, state).told
    assert budgets.check(asked_of(ToolSpec("get")), state, 0.0) is None
    assert (state.writes, state.calls) == (2, 3)


def test_a_write_that_waited_for_its_approval_finds_the_budget_spent_by_another():
    state, asked = state_of(writes=1), asked_of(ToolSpec("put", tier=TIERS.IRREVERSIBLE))
    assert tier.check(asked, state) is None
    state.writes = 1
    assert budgets.check(asked, state, 0.0).rule == "tier:writes"
    assert (state.writes, state.calls) == (1, 0)


def test_zero_is_no_limit():
    state = state_of(writes=0)
    state.writes = 10_000
    assert tier.check(asked_of(ToolSpec("put", tier=TIERS.WRITE)), state) is None
