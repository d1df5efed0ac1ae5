"""Corrections side by side on one batch: their effective weights are those worked by hand, and so are the shares."""

import numpy as np
import pytest

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.config.algorithm import CorrectionConfig
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.samples import Sample
from headrace.trainer.sensitivity import CLIP, KEEP, NONE, OWN, SEQUENCE, TOKEN, corrections, own_name, sensitivity

SHAPE = TinyLlamaConfig(hidden=32, layers=1, heads=2, intermediate=32, max_positions=32)
CONFIG = LearnerConfig(microbatch_tokens=24)
OPTIONS = GrpoConfig(clip_low=0.2, clip_high=0.28, correction=CorrectionConfig(cap=2.0))
PROMPT = 3


def backend(config: LearnerConfig = CONFIG) -> TorchBackend:
    return TorchBackend(build_tiny_llama(SHAPE, 20, 0, pad_token_id=0, eos_token_id=1), config)


def batch(model: TorchBackend, ratios, advantages, lags=None) -> list[Sample]:
    """A sample for each entry: `ratios` of learner to behaviour, one for each of its action tokens."""
    rng = np.random.default_rng(0)
    samples = []
    for number, (own, advantage) in enumerate(zip(ratios, advantages, strict=True)):
        length = PROMPT + len(own)
        mask = np.array([0] * PROMPT + [1] * len(own), np.uint8)
        plain = Sample(
            episode_id=f"run.t{number}.0.0",
            agent_id="",
            segment=0,
            lag=lags[number] if lags else 0,
            token_ids=i32(rng.integers(2, 20, length)),
            action_mask=mask,
            loss_mask=mask,
            behaviour_logprobs=f32([0.0] * length),
            advantages=f32(mask * advantage),
            temperatures=f32([1.0] * length),
        )
        (now,) = model.logprobs([plain])
        stale = now - np.concatenate([np.zeros(PROMPT), np.log(own)]).astype(np.float32)
        samples.append(Sample(**{**_fields(plain), "behaviour_logprobs": f32(stale * mask)}))
    return samples


def _fields(sample: Sample) -> dict:
    return {name: getattr(sample, name) for name in Sample.__dataclass_fields__}


def scored(ratios, advantages, lags=None, options=OPTIONS):
    model = backend()
    found = sensitivity(model.model, batch(model, ratios, advantages, lags), options, CONFIG)
    return {one.name: one for one in found}


def test_on_policy_they_are_all_the_same():
    found = scored([[1.0] * 4, [1.0] * 2], [1.0, -0.5])
    assert set(found) == {NONE, CLIP, TOKEN, SEQUENCE, KEEP}
    for one in found.values():
        assert one.grad_norm == pytest.approx(found[NONE].grad_norm, rel=1e-4)
        assert one.cosine_uncorrected == pytest.approx(1, abs=1e-5) and one.cosine_own == pytest.approx(1, abs=1e-5)
        assert one.all.loss == pytest.approx(-(4 * 1.0 - 2 * 0.5) / 6, abs=1e-5)
        assert (one.all.clip_share, one.all.tokens, one.all.sequences) == (0, 6, 2)
        assert one.all.kl == pytest.approx(0, abs=1e-6)
        assert one.all.token_share == pytest.approx(1, abs=1e-4)
        assert one.all.sequence_share == pytest.approx(1, abs=1e-4)


def test_each_weighs_tokens_as_its_formula_says():
    """Two sequences of two tokens, A = 1: ratios 1, 1 and 4, 1. Clipped at 1.28, capped at 2, kept within 0.5 and 2."""
    found = scored([[1.0, 1.0], [4.0, 1.0]], [1.0, 1.0])
    weights = {
        NONE: [1, 1, 4, 1],
        CLIP: [1, 1, 0, 1],  # 4 > 1.28 and A > 0
        TOKEN: [1, 1, 2, 1],  # min(4, 2)
        SEQUENCE: [1, 1, 2, 2],  # min(4 * 1, 2)
        KEEP: [1, 1, 0, 1],  # the geometric mean 2 is kept, the clip is left
    }
    for name, w in weights.items():
        bucket = found[name].all
        assert bucket.token_share == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / 4, rel=1e-3), name
        s = [(w[0] + w[1]) / 2, (w[2] + w[3]) / 2]
        assert bucket.sequence_share == pytest.approx(sum(s) ** 2 / (s[0] ** 2 + s[1] ** 2) / 2, rel=1e-3), name
        assert bucket.largest_weight == pytest.approx(max(w), rel=1e-3), name
        assert bucket.clip_share == (0.25 if name in (CLIP, KEEP) else 0), name
        assert bucket.kl == pytest.approx((4 - 1 - np.log(4)) / 4, rel=1e-3), "k3, the same for all"


def test_losses_are_those_of_the_formulas():
    found = scored([[1.0, 1.0], [4.0, 1.0]], [1.0, 1.0])
    expected = {NONE: -7 / 4, CLIP: -4.28 / 4, TOKEN: -5 / 4, SEQUENCE: -6 / 4}
    assert {name: found[name].all.loss for name in expected} == pytest.approx(expected, rel=1e-3)


def test_a_masked_sequence_teaches_nothing():
    found = scored([[1.0, 1.0], [4.0, 4.0]], [1.0, -1.0])
    one = found[KEEP].all
    assert one.loss == pytest.approx(-0.5, abs=1e-4)
    assert one.sequence_share == pytest.approx(0.5, abs=1e-3)
    assert found[KEEP].cosine_uncorrected < found[TOKEN].cosine_uncorrected < 1


def test_lags_and_quartiles_of_length_add_up():  # P14
    ratios = [[1.5] * n for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    for one in scored(ratios, [1.0, -1.0] * 4, lags=[0, 0, 0, 1, 1, 1, 3, 3]).values():
        assert list(one.by_lag) == [0, 1, 3]
        assert [bucket.sequences for bucket in one.by_lag.values()] == [3, 3, 2]
        assert [bucket.tokens for bucket in one.by_lag.values()] == [6, 15, 15]
        assert {edge: bucket.sequences for edge, bucket in one.by_length.items()} == {5: 2, 7: 2, 9: 2, 11: 2}
        for buckets in (one.by_lag, one.by_length):
            assert sum(bucket.loss for bucket in buckets.values()) == pytest.approx(one.all.loss, abs=1e-6)
            assert sum(bucket.tokens for bucket in buckets.values()) == 36


def test_without_any_advantage_there_is_no_weight_and_no_direction():
    for one in scored([[1.0, 2.0]], [0.0]).values():
        assert (one.grad_norm, one.cosine_uncorrected, one.cosine_own) == (0, None, None)
        assert (one.all.token_share, one.all.sequence_share) == (None, None)


def test_the_gradient_of_the_runs_own_is_that_of_its_step():
    model = backend()
    samples = batch(model, [[1.5, 0.5, 1.0], [2.0, 1.1]], [1.0, -0.7])
    found = sensitivity(model.model, samples, OPTIONS, CONFIG)
    (own,) = [one for one in found if one.is_own]
    statistics = model.step(samples, build_algorithm(OPTIONS))
    assert own.name == CLIP
    assert own.grad_norm == pytest.approx(statistics["grad_norm"], rel=1e-4)
    assert own.all.loss == pytest.approx(statistics["loss"], rel=1e-4)
    assert own.all.clip_share == pytest.approx(statistics["clip_share"])


def test_scoring_leaves_no_trace():
    model = backend()
    before = model.save()
    sensitivity(model.model, batch(model, [[2.0]], [1.0]), OPTIONS, CONFIG)
    assert model.save() == before
    assert all(parameter.grad is None for parameter in model.model.parameters())


@pytest.mark.parametrize(
    ("correction", "name"),
    [
        ({}, CLIP),
        ({"kind": "decoupled"}, TOKEN),
        ({"kind": "decoupled", "weights": "sequence"}, SEQUENCE),
        ({"keep": (0.9, 1.1)}, KEEP),
        ({"kind": "decoupled", "keep": (0.9, 1.1)}, OWN),
    ],
)
def test_the_recipes_correction_is_among_them(correction, name):
    options = GrpoConfig(correction=CorrectionConfig(**correction), entropy=0.1)
    assert own_name(options) == name
    found = corrections(options)
    chosen = found[name]
    assert chosen.correction.kind == options.correction.kind and chosen.correction.keep == options.correction.keep
    assert all(one.entropy == 0 and one.kl.coefficient == 0 for one in found.values())
    assert (OWN in found) == (name == OWN)


def test_a_batch_without_loss_tokens_is_refused():
    with pytest.raises(ValueError, match="no token"):
        sensitivity(backend().model, [], OPTIONS, CONFIG)
