"""How many calls, how fast, and for how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.gateway.decisions import budgets
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.policy import CallBudgets, Policy
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, SideEffectTier


def state_of(**limits):
    policy = Policy(budgets=CallBudgets(**limits))
    return EpisodeState("e/0#1", policy, {}, frozenset(), (Grant(Capability.READ),), 0.0)


def rules(state, *specs):
    asked = [Asked(ToolCall(spec.name), spec, "e/0/0/0", here=False) for spec in specs]
    denials = [budgets.check(each, state, 0.0) for each in asked]
    return [denial and denial.rule for denial in denials]


GET, FIND = ToolSpec("get"), ToolSpec("find", price=0.4)


def test_calls_are_limited_together_and_by_tool():
    state = state_of(calls=3, calls_of={"get": 1})
    assert rules(state, GET, GET, FIND, FIND, FIND) == [None, "budget:calls_of", None, None, "budget:calls"]
    assert (state.calls, state.calls_of) == (3, {"get": 1, "find": 2})


def test_money_is_limited_and_the_model_told_what_is_left():
    state = state_of(money=1.0)
    assert rules(state, FIND, FIND, FIND, GET) == [None, None, "budget:money", None]
    assert state.money == pytest.approx(0.8)
    denial = budgets.check(Asked(ToolCall("find"), FIND, "k", here=False), state, 0.0)
    assert denial.told == "find costs 0.4, and 0.2 is left"


def test_a_call_that_is_denied_costs_nothing():
    state = state_of(money=0.1)
    assert rules(state, FIND) == ["budget:money"]
    assert (state.calls, state.calls_of, state.money, state.writes) == (0, {}, 0.0, 0)


def test_zero_is_no_limit():
    state = state_of()
    assert set(rules(state, *[FIND] * 100)) == {None}
    assert state.money == pytest.approx(40.0)


def test_calls_take_turns():
    state = state_of(calls_per_s=2.0)
    assert [budgets.wait_s(state, 10.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert budgets.wait_s(state, 11.0) == 0.5
    assert budgets.wait_s(state, 20.0) == 0.0


def test_without_a_rate_nothing_waits():
    state = state_of()
    assert [budgets.wait_s(state, 1.0), state.next_call_s] == [0.0, 0.0]


def test_who_would_not_wait_takes_no_turn():
    state = state_of(calls_per_s=1.0)
    assert [budgets.wait_s(state, 0.0, most_s=1.5) for _ in range(4)] == [0.0, 1.0, 2.0, 2.0]
    assert budgets.wait_s(state, 1.0, most_s=1.5) == 1.0


CALL = st.sampled_from([GET, FIND, ToolSpec("put", tier=SideEffectTier.WRITE, price=0.1)])


@given(st.lists(CALL, max_size=30), st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_order_of_calls_gets_over_a_limit(specs, calls, writes, money):
    state = state_of(calls=calls, writes=writes, money=money, calls_of={"get": 2})
    allowed = [spec for spec, rule in zip(specs, rules(state, *specs), strict=True) if rule is None]
    assert (len(allowed), sum(spec.name == "put" for spec in allowed)) == (state.calls, state.writes)
    assert sum(spec.name == "get" for spec in allowed) <= 2
    assert (not calls or state.calls <= calls) and (not writes or state.writes <= writes)
    assert not money or sum(spec.price for spec in allowed) <= money + 1e-9
