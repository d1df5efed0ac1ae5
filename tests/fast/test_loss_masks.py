"""Which tokens may enter a loss at all: those that the policy sampled, and of them those that nothing masks.

case T7: prompts, tools, users and scaffold never do; T9 and T10 (what a masked or a padded position holds) are in
test_loss.py, and here for whole roles.
"""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.errors import FidelityError
from headrace.platform.fidelity import check_episode
from headrace.platform.records import AttemptId, Role, f32, i32
from headrace.platform.records.generation import SamplingParams
from headrace.platform.records.tables import LossMaskReason, MaskedSpan
from headrace.platform.records.turn import Turn
from headrace.platform.records.versions import VersionRef, VersionSpan
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.samples import build_samples

GIVEN = [Role.SYSTEM, Role.USER, Role.TOOL]
SAMPLED, INTERCEPTED, OTHERS = 7, 11, 3
TINY = TinyLlamaConfig(hidden=16, layers=1, heads=2, intermediate=16, max_positions=64)


def intercepted_turn(pattern: list[int]) -> Turn:
    """An assistant's turn in which something between policy and world wrote the tokens whose pattern is 0."""
    mask = np.array(pattern, np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    spans = tuple(
        VersionSpan(VersionRef("policy", 0), int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)
    )
    return Turn(
        role=Role.ASSISTANT,
        token_ids=i32([SAMPLED if one else INTERCEPTED for one in pattern]),
        action_mask=mask,
        behaviour_logprobs=f32(mask * -0.5),
        version_spans=spans,
        sampling=SamplingParams(),
    )


@st.composite
def conversations(draw):
    """Turns of every role in any order; the assistant's with tokens of others in between."""
    patterns = st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(any)
    turns = [plain_turn(Role.SYSTEM, token_ids=[OTHERS] * draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 5))):
        for role in draw(st.lists(st.sampled_from(GIVEN), max_size=3)):
            turns.append(plain_turn(role, token_ids=[OTHERS] * draw(st.integers(1, 5))))
        turns.append(intercepted_turn(draw(patterns)))
    return turns


@settings(max_examples=60, deadline=None)
@given(turns=conversations(), data=st.data())
def test_only_what_the_policy_sampled_and_nothing_masks(turns, data):
    """case T7: over any conversation the loss tokens are the sampled ones, less those in masked spans."""
    episode = make_episode(turns)
    own = [index for index, turn in enumerate(turns) if turn.is_action]
    cut = data.draw(st.sampled_from(own))
    masked = [MaskedSpan(cut, 0, data.draw(st.integers(1, len(turns[cut].token_ids))), LossMaskReason.OVERLONG)]
    samples = build_samples(episode, [1.0] * len(own), masked=masked)
    trained = np.concatenate([sample.token_ids[sample.loss_mask == 1] for sample in samples])
    expected = sum(int(turn.action_mask.sum()) for turn in turns)
    expected -= int(turns[cut].action_mask[: masked[0].end].sum())
    assert trained.tolist() == [SAMPLED] * expected
    for sample in samples:
        assert not np.any(sample.loss_mask > sample.action_mask)
        assert not np.any(sample.advantages[sample.action_mask == 0])


@pytest.mark.parametrize("role", GIVEN)
def test_a_mask_on_another_role_is_refused_at_the_gate(role):
    """case T7: a recorder that marked what the policy did not sample is found out before anything is trained."""
    wrong = msgspec.structs.replace(policy_turn(), role=role)
    with pytest.raises(FidelityError, match=f"{role} turn are marked as sampled"):
        check_episode(make_episode([plain_turn(Role.USER), policy_turn(), wrong]))


@pytest.mark.parametrize("reason", list(LossMaskReason))
def test_every_reason_masks_alike(reason):
    episode = make_episode()
    (sample,) = build_samples(episode, [1.0], masked=[MaskedSpan(1, 0, 2, reason)])
    assert (sample.loss_tokens, int(sample.action_mask.sum())) == (1, 3)


def test_what_others_wrote_has_no_gradient():
    """cases T7 and T9: advantages and logprobs at tokens of others may be anything, NaN too; the step is the same."""
    turns = [
        plain_turn(Role.SYSTEM, token_ids=[OTHERS] * 3),
        intercepted_turn([1, 0, 1]),
        plain_turn(Role.TOOL, token_ids=[OTHERS] * 4),
        intercepted_turn([0, 1]),
    ]
    episode = make_episode(turns, attempt_id=AttemptId("run", 0, 0))
    (clean,) = build_samples(episode, [1.0, -1.0])
    nan = f32(np.where(clean.action_mask == 1, clean.advantages, np.nan))
    dirty = dataclasses.replace(clean, advantages=nan, behaviour_logprobs=f32(clean.behaviour_logprobs + 0 * nan))
    figures, weights = [], []
    for sample in (clean, dirty):
        backend = TorchBackend(build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1), LearnerConfig())
        figures.append(dict(backend.step([sample], build_algorithm(GrpoConfig()))))
        weights.append(backend.weights()["model.safetensors"])
    assert figures[0] == figures[1]
    assert figures[0]["loss_tokens"] == 3
    assert weights[0] == weights[1]
