"""What `headrace inspect` says of an episode's training: the receipt, every sampled token accounted for, or why not."""

import pytest

from headrace.deploy.training_facts import training_facts
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason, Fate, FaultOwner, Purpose, Role
from headrace.platform.records.tables import FateRow, LossMaskReason, MaskedSpan, Receipt
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

TURNS = (plain_turn(Role.USER), policy_turn(), plain_turn(Role.TOOL), policy_turn(token_ids=(7, 8)))
EPISODE = make_episode(TURNS)
NAME = EPISODE.episode_id


def fate(kind: Fate, reason: str = "", version: int | None = None) -> FateRow:
    return FateRow(episode_id=NAME, fate=kind, reason=reason, version=version)


def receipt(version: int = 3, **fields) -> Receipt:
    return Receipt(episode_id=NAME, version=version, advantages=(0.5, -0.5), **fields)


def test_a_trained_episode_has_its_receipt_and_every_sampled_token_is_accounted_for():
    span = MaskedSpan(1, 0, 3, LossMaskReason.LAG)
    row = receipt(step=3, lag=2, loss_tokens=2, ratio_mean=1.25, clip_share=0.5, masked=(span,))
    facts = training_facts(EPISODE, fate(Fate.TRAINED, version=3), [row])
    assert facts["trained"] and (facts["version"], facts["step"], facts["lag"]) == (3, 3, 2)
    assert facts["advantages"] == [0.5, -0.5]
    assert (facts["action_tokens"], facts["loss_tokens"], facts["unaccounted"]) == (5, 2, 0)
    assert (facts["ratio_mean"], facts["clip_share"]) == (1.25, 0.5)
    (masked,) = facts["masked"]
    assert (masked["turn"], masked["tokens"], masked["reason"]) == (1, 3, "lag")
    assert "lag limit" in masked["why"]


def test_a_gap_in_the_books_shows():
    facts = training_facts(EPISODE, fate(Fate.TRAINED, version=3), [receipt(loss_tokens=4)])
    assert facts["unaccounted"] == 1


def test_a_receipt_older_than_the_step_column_says_so():
    assert training_facts(EPISODE, None, [receipt(loss_tokens=5)])["step"] is None


def test_after_a_rollback_the_last_training_counts():  # P6
    rows = [receipt(3, loss_tokens=5), receipt(5, loss_tokens=5, lag=1)]
    facts = training_facts(EPISODE, fate(Fate.TRAINED, version=5), rows)
    assert (facts["version"], facts["lag"], facts["before"]) == (5, 1, [3])
    undone = training_facts(EPISODE, fate(Fate.DROPPED, "lag"), rows)
    assert not undone["trained"]
    assert "version 5 was trained on it and rolled back" in undone["why"] and "lag limit" in undone["why"]


@pytest.mark.parametrize("reason", DropReason)
def test_every_drop_has_a_sentence(reason):
    why = training_facts(EPISODE, fate(Fate.DROPPED, reason), [])["why"]
    assert why.startswith("dropped: ") and len(why) > len(f"dropped: {reason}")


@pytest.mark.parametrize("reason", CancelReason)
def test_every_cancellation_has_a_sentence(reason):
    why = training_facts(EPISODE, fate(Fate.CANCELLED, reason), [])["why"]
    assert why.startswith("cancelled: ") and len(why) > len(f"cancelled: {reason}")


@pytest.mark.parametrize("owner", [owner for owner in FaultOwner if owner is not FaultOwner.NONE])
def test_every_failure_names_its_owner(owner):
    why = training_facts(EPISODE, fate(Fate.FAILED, owner), [])["why"]
    assert why.startswith("failed: ") and len(why) > len(f"failed: {owner}")


def test_what_is_not_for_training_or_not_over_says_so():
    evaluated = make_episode(TURNS, attempt_id=AttemptId("test-run", 0, 0, purpose=Purpose.EVAL))
    assert "purpose train" in training_facts(evaluated, None, [])["why"]
    assert "not known" in training_facts(EPISODE, None, [])["why"]
    assert "queue" in training_facts(EPISODE, fate(Fate.IN_FLIGHT), [])["why"]
    assert "receipt is missing" in training_facts(EPISODE, fate(Fate.TRAINED, version=3), [])["why"]


@pytest.mark.parametrize("reason", LossMaskReason)
def test_every_reason_of_a_mask_has_a_sentence(reason):
    row = receipt(loss_tokens=4, masked=(MaskedSpan(1, 0, 1, reason),))
    (masked,) = training_facts(EPISODE, None, [row])["masked"]
    assert masked["reason"] == reason and masked["why"]
