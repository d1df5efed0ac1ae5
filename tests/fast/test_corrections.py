"""Off-policy corrections, by hand."""

import math

import pytest
import torch
from loss_kit import columns

from headrace.platform.config import GrpoConfig
from headrace.trainer.algorithms import Grpo
from headrace.trainer.corrections import (
    clipped_surrogate,
    kept_sequences,
    sequence_log_ratio,
    sequence_weights,
    token_weights,
)

ROW = torch.tensor([0, 0, 1])


def logs(*ratios: float) -> torch.Tensor:
    return torch.log(torch.tensor(ratios))


def test_the_token_clip_by_hand():
    """Bounds 0.8 and 1.28: clipped only where the ratio has gone further in the direction of the advantage."""
    ratio, advantages = torch.tensor([2.0, 2.0, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    surrogate, clipped = clipped_surrogate(ratio, advantages, 0.2, 0.28)
    assert surrogate.tolist() == pytest.approx([1.28, -2.0, 0.5, -0.8])
    assert clipped.tolist() == [True, False, False, True]


def test_truncated_weights_by_hand():
    """Ratios 2, 1/8 | 4 with cap 3; of the sequences the products 1/4 and 4."""
    ratios = logs(2.0, 0.125, 4.0)
    assert token_weights(ratios, 3.0).tolist() == pytest.approx([2.0, 0.125, 3.0])
    assert sequence_weights(ratios, ROW, 3.0).tolist() == pytest.approx([0.25, 0.25, 3.0])


def test_weights_have_no_gradient():
    ratios = logs(2.0, 0.125, 4.0).requires_grad_()
    assert not token_weights(ratios, 3.0).requires_grad
    assert not sequence_weights(ratios, ROW, 3.0).requires_grad


def test_sequences_are_kept_by_their_geometric_mean():
    """sqrt(2 * 1/8) = 1/2 and 4."""
    ratios = logs(2.0, 0.125, 4.0)
    assert kept_sequences(ratios, ROW, 0.4, 3.0).tolist() == [True, True, False]
    assert kept_sequences(ratios, ROW, 0.6, 5.0).tolist() == [False, False, True]


def test_the_sequence_ratio_is_the_geometric_mean_with_the_tokens_gradient():
    """d/dx of exp(mean log ratio) is 1/2 of it per token; summed over both tokens it is the ratio itself."""
    ratios = logs(2.0, 0.125, 4.0).requires_grad_()
    sequence = sequence_log_ratio(ratios, ROW).exp()
    assert sequence.tolist() == pytest.approx([0.5, 0.5, 4.0])
    sequence.sum().backward()
    assert ratios.grad.tolist() == pytest.approx([0.5, 0.5, 4.0])


def decoupled(**options) -> Grpo:
    return Grpo(GrpoConfig(correction={"kind": "decoupled", **options}))


def test_the_decoupled_loss_by_hand():
    """Behaviour 1/4, proximal 1/2, learner 3/4 of some scale, advantage 1: clipped min(1.5, 1.28), weight 2 or 1.5."""
    batch = columns([[math.log(0.25)]], [[1.0]], proximal=[[math.log(0.5)]])
    learner = logs(0.75)
    assert float(decoupled().loss(learner, batch).loss) == pytest.approx(-2 * 1.28)
    assert float(decoupled(cap=1.5).loss(learner, batch).loss) == pytest.approx(-1.5 * 1.28)
    assert decoupled().loss(learner, batch).kl.tolist() == pytest.approx([2 - math.log(3)])


def test_without_proximal_logprobs_the_present_weights_are_the_proximal_ones():
    """One update per batch: the ratio to clip is 1, the weight is the whole way; clip would have had no gradient."""
    batch = columns([[math.log(0.25)]], [[1.0]])
    learner = logs(0.5).requires_grad_()
    output = decoupled().loss(learner, batch)
    assert output.ratio.tolist() == [1.0]
    output.loss.backward()
    assert learner.grad.tolist() == pytest.approx([-2.0])


def test_decoupled_sequence_weights_by_hand():
    """Stale ratios 2 and 1/4 multiply to 1/2; the third sequence has 3, above the cap of 2. Present ratio 1."""
    batch = columns([[0.0, 0.0], [0.0]], [[1.0, 1.0], [1.0]])
    learner = logs(2.0, 0.25, 3.0)
    assert float(decoupled(weights="sequence").loss(learner, batch).loss) == pytest.approx(-(0.5 + 0.5 + 2.0) / 3)


@pytest.mark.parametrize("kind", ["clip", "decoupled"])
def test_sequences_out_of_bounds_teach_nothing(kind):
    """They stay in the denominator, so the others count no more than before."""
    algorithm = Grpo(GrpoConfig(correction={"kind": kind, "keep": [0.5, 2.0]}))
    learner = logs(1.0, 1.0, 4.0).requires_grad_()
    algorithm.loss(learner, columns([[0.0, 0.0], [0.0]], [[1.0, 1.0], [-1.0]])).loss.backward()
    assert learner.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0])
