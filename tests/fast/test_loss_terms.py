"""The terms of the loss that need more than logprobs, through the torch backend: reference, entropy."""

import math

import pytest
import torch
from test_torch_backend import batch, sample, tiny

from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.errors import RunFailed
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import pack
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packing import pack_tokens


def backend(**algorithm) -> tuple[TorchBackend, GrpoConfig]:
    config = GrpoConfig(**algorithm)
    return TorchBackend(tiny(), LearnerConfig(microbatch_tokens=64, lr=0.05, warmup=0, algorithm=config)), config


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_is_that_of_the_distribution_sampled_from(packed, temperature):
    model = tiny().eval()
    forward = TokenLogprobs(model, packed=packed)
    rows = [sample(f"run.t0.{n}.0", 5 + n, n, temperature) for n in range(3)]
    (micro,) = pack_tokens(rows, 1000, share_prefixes=False) if packed else pack(rows, 1000)
    found = forward.of(micro, micro.loss_mask, entropy=True)
    tokens = micro.loss_tokens(1)
    for n in range(len(found.logprobs)):
        row, column = micro.rows[int(tokens.row[n])], int(tokens.column[n])
        with torch.no_grad():
            logits = tiny().eval()(input_ids=torch.tensor(row.token_ids[None, :].astype("int64"))).logits[0, column - 1]
        drawn = torch.distributions.Categorical(logits=logits / temperature)
        assert float(found.entropy[n].detach()) == pytest.approx(float(drawn.entropy()), abs=1e-5)
        assert float(found.logprobs[n].detach()) == pytest.approx(
            float(drawn.log_prob(torch.tensor(int(row.token_ids[column])))), abs=1e-5
        )


def test_an_entropy_bonus_raises_entropy_and_is_reported():
    found, config = backend(entropy=1.0)
    first = found.step(batch(0), build_algorithm(config))
    for _ in range(5):
        last = found.step(batch(0), build_algorithm(config))
    assert 0 < first["entropy"] < last["entropy"] <= math.log(24) + 1e-6
    assert "entropy" not in backend()[0].step(batch(0), build_algorithm(GrpoConfig()))


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_reference_is_what_the_run_began_with(where):
    """At first the divergence is 0; a strong coefficient in the loss holds it down."""
    ends = {}
    for coefficient in (1e-9, 3.0):
        found, config = backend(kl={"coefficient": coefficient, "where": where})
        first = found.step(batch(0), build_algorithm(config))
        assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
        for _ in range(6):
            last = found.step(batch(0), build_algorithm(config))
        ends[coefficient] = last["reference_kl"]
        assert last["reference_kl"] > 1e-4
    if where == "loss":
        assert ends[3.0] < ends[1e-9] / 2


def test_a_resume_keeps_the_reference():
    found, config = backend(kl={"coefficient": 0.1})
    for _ in range(3):
        found.step(batch(0), build_algorithm(config))
    again, _ = backend(kl={"coefficient": 0.1})
    again.restore(found.save())
    one, other = (each.step(batch(1), build_algorithm(config)) for each in (found, again))
    assert dict(one) == dict(other)
    assert one["reference_kl"] > 1e-4


def test_another_reference_than_the_runs_is_refused():
    found, _ = backend(kl={"coefficient": 0.1})
    config = LearnerConfig(microbatch_tokens=64, algorithm=GrpoConfig(kl={"coefficient": 0.1}))
    with pytest.raises(RunFailed, match=r"began with other weights.*model\.path"):
        TorchBackend(tiny(seed=1), config).restore(found.save())
    plain, _ = backend()
    TorchBackend(tiny(seed=1), LearnerConfig(microbatch_tokens=64)).restore(plain.save())  # needs none


def test_without_a_coefficient_no_reference_is_held():
    assert backend()[0]._reference is None
