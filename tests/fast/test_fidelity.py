import time

import msgspec
import numpy as np
import pytest

from headrace.platform.errors import FidelityError
from headrace.platform.fidelity import check_episode
from headrace.platform.records import (
    ContentPart,
    FaultOwner,
    Role,
    Status,
    StopReason,
    TokenColumn,
    ToolCallRecord,
    UpdateMode,
    VersionRef,
    VersionSpan,
    View,
    f32,
    i32,
)
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def broken(turn, **fields):
    """An episode whose second turn is `turn` with `fields` changed."""
    return make_episode((plain_turn(Role.USER), msgspec.structs.replace(turn, **fields)))


def refused(episode, rule, *figures):
    with pytest.raises(FidelityError) as caught:
        check_episode(episode)
    text = str(caught.value)
    assert text.startswith(f"{rule}: ")
    for figure in figures:
        assert str(figure) in text
    return text


def test_whole_episodes_pass():
    check_episode(make_episode())
    half = policy_turn("x", (7, 4, 5, 6))
    mask = np.array([0, 1, 1, 0], dtype=np.uint8)
    spans = (VersionSpan(VersionRef("policy", 0), 1, 3),)
    check_episode(broken(half, action_mask=mask, behaviour_logprobs=f32([0, -1, -2, 0]), version_spans=spans))


# case T16
@pytest.mark.parametrize("field", ["token_ids", "action_mask", "behaviour_logprobs"])
@pytest.mark.parametrize("cut", [-1, 1])
def test_arrays_of_different_length_are_refused(field, cut):
    turn = policy_turn()
    array = getattr(turn, field)
    other = array[:-1] if cut < 0 else np.append(array, array[:1])
    refused(broken(turn, **{field: other}), "lengths", "turn 1", "3", "2" if cut < 0 else "4")


@pytest.mark.parametrize("field", ["token_ids", "action_mask", "behaviour_logprobs"])
def test_wrong_dtype_and_shape_are_refused(field):
    turn = policy_turn()
    refused(broken(turn, **{field: getattr(turn, field).astype(np.float64)}), "dtype", "turn 1", "float64")
    refused(broken(turn, **{field: getattr(turn, field).reshape(1, 3)}), "shape", "turn 1", "(1, 3)")


# cases T5, T6, T7
@pytest.mark.parametrize("role", [Role.SYSTEM, Role.USER, Role.TOOL])
def test_a_turn_that_is_not_the_policys_has_no_action(role):
    turn = msgspec.structs.replace(policy_turn(), role=role)
    refused(make_episode((turn, policy_turn())), "mask", "turn 0", role, "3 tokens")
    plain = msgspec.structs.replace(plain_turn(role), behaviour_logprobs=f32([0, -1, 0]))
    refused(make_episode((plain, policy_turn())), "logprobs", "turn 0")
    spanned = msgspec.structs.replace(plain_turn(role), version_spans=policy_turn().version_spans)
    refused(make_episode((spanned, policy_turn())), "spans", "turn 0")


def test_mask_values():
    refused(broken(policy_turn(), action_mask=np.array([1, 2, 1], dtype=np.uint8)), "mask", "turn 1", "2")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.01])
def test_logprobs_of_actions_are_finite_and_not_positive(value):
    refused(broken(policy_turn(logprobs=(-0.5, value, -0.5))), "logprobs", "turn 1")


def test_logprobs_may_round_to_zero_but_not_above():
    check_episode(broken(policy_turn(logprobs=(0.0, 5e-7, -1.0))))
    refused(broken(policy_turn(logprobs=(0.0, 2e-6, -1.0))), "logprobs", "turn 1")


@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_logprob_where_the_mask_is_zero(value):
    mask = np.array([1, 1, 0], dtype=np.uint8)
    spans = (VersionSpan(VersionRef("policy", 0), 0, 2),)
    turn = policy_turn(logprobs=(-0.5, -0.5, value))
    refused(broken(turn, action_mask=mask, version_spans=spans), "logprobs", "turn 1", "mask is 0")


# case T20
@pytest.mark.parametrize(
    "bounds",
    [
        [],  # no version at all
        [(0, 2)],  # an action token without a version
        [(0, 4)],  # past the end
        [(0, 3), (1, 2)],  # twice
        [(1, 3), (0, 1)],  # out of order
        [(0, 0), (0, 3)],  # empty
        [(-1, 3)],
    ],
)
def test_spans_cover_the_action_tokens_and_nothing_else(bounds):
    spans = tuple(VersionSpan(VersionRef("policy", 0), start, end) for start, end in bounds)
    refused(broken(policy_turn(), version_spans=spans), "spans", "turn 1")


def test_span_over_a_prompt_token():
    mask = np.array([0, 1, 1], dtype=np.uint8)
    turn = policy_turn(logprobs=(0, -1, -1))
    refused(broken(turn, action_mask=mask), "spans", "turn 1", "did not sample")


def test_sticky_episodes_have_one_version():
    other = policy_turn(version=3)
    refused(make_episode((other,), version=2), "versions", "turn 0", "policy@v3", "policy@v2")
    check_episode(make_episode((other,), version=2, update_mode=UpdateMode.TURN))


def test_negative_token_ids():
    refused(broken(policy_turn(), token_ids=i32([4, -1, 6])), "ids", "turn 1", "-1")


def test_token_columns_have_the_turns_length():
    good = {"entropy": TokenColumn(f32([1, 1, 1]), "action", "engine")}
    check_episode(broken(policy_turn(), token_columns=good))
    refused(broken(policy_turn(), token_columns={"entropy": TokenColumn(f32([1]), "action", "x")}), "columns", "turn 1")
    wide = {"entropy": TokenColumn(np.zeros(3), "action", "engine")}
    refused(broken(policy_turn(), token_columns=wide), "columns", "float64")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"truncated": True}, "end"),
        ({"terminated": False}, "end"),
        ({"stop_reason": StopReason.MAX_TURNS}, "end"),
        ({"status": Status.BUDGET_EXHAUSTED}, "end"),
        ({"fault_owner": FaultOwner.ENVIRONMENT}, "owner"),
        ({"status": Status.ENV_BUG}, "owner"),
        ({"status": Status.ENV_BUG, "fault_owner": FaultOwner.MODEL}, "owner"),
        ({"status": Status.SAFETY_BLOCK, "fault_owner": FaultOwner.NONE}, "owner"),
        ({"turns": (plain_turn(Role.USER),), "views": ()}, "actions"),
        ({"views": (View(0, ()),)}, "views"),
        ({"views": (View(7, ()),)}, "views"),
        ({"views": (View(1, ((0, 2),)),)}, "views"),
    ],
)
def test_episode_rules(fields, rule):
    refused(make_episode(**fields), rule)


def test_ends_that_are_consistent():
    budget = {"stop_reason": StopReason.MAX_SECONDS, "terminated": False, "truncated": True}
    check_episode(make_episode((plain_turn(Role.USER),), status=Status.BUDGET_EXHAUSTED, **budget))
    fault = {"stop_reason": StopReason.FAULT, "terminated": False, "fault_owner": FaultOwner.INFRASTRUCTURE}
    check_episode(make_episode(status=Status.ENV_TRANSIENT, **fault))


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a\ud800b"},
        {"reasoning": "\udfff"},
        {"parts": (ContentPart("\ud800"),)},
        {"tool_calls": (ToolCallRecord(index=0, call_id="", name="get", arguments={"k": "\ud800"}),)},
        {"metadata": {"\ud800": 1}},
    ],
)
def test_text_that_is_not_utf8(fields):
    refused(broken(policy_turn(), **fields), "text", "turn 1")
    refused(make_episode(fault="\ud800"), "text")


def test_what_the_codec_has_decoded_is_checked_for_all_but_its_texts():
    check_episode(make_episode(fault="\ud800"), from_wire=True)
    with pytest.raises(FidelityError, match="logprobs: turn 1"):
        check_episode(broken(policy_turn(), behaviour_logprobs=f32([0.0, 0.0, np.nan])), from_wire=True)


def test_nothing_is_repaired():
    episode = make_episode()
    before = [turn.token_ids.tobytes() for turn in episode.turns]
    check_episode(episode)
    assert [turn.token_ids.tobytes() for turn in episode.turns] == before


def test_cost_per_turn():
    turns = [t for _ in range(4) for t in (plain_turn(Role.USER, token_ids=range(200)), policy_turn("x", range(200)))]
    episode = make_episode(turns)
    best = float("inf")
    for _ in range(20):
        begin = time.process_time()
        for _ in range(10):
            check_episode(episode)
        best = min(best, (time.process_time() - begin) / (10 * len(turns)))
    assert best < 60e-6, f"{best * 1e6:.1f} µs a turn"  # 15 on an idle machine; slack for a loaded one
