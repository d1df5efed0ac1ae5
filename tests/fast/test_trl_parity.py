"""The same episodes under TRL's trainers and under headrace: equal advantages, losses and gradients of every parameter.

TRL pads, scores and differentiates as it does in `train`; headrace goes the whole way from episodes to its backend's
step, packed and with shared prompts. Both are GRPO in fp32, so what differs is rounding. Where the two differ by
design, a test says in what, and shows equality with that accounted for.

TRL's `loss_type` is our `aggregation`: dapo and bnpo are `token`, grpo is `sequence`, dr_grpo is `fixed`. There is no
counterpart here to its cispo, sapo, luspo and vespo, to `delta`, to `off_policy_mask_threshold`, which drops sequences
by advantage too, to `scale_rewards="batch"`, to `top_entropy_quantile`, or to `use_bias_correction_kl`, which is on
there by default and weighs k3 by the ratio.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trl_kit import Played, grpo_trainer, loss_and_gradients, padded, rloo_trainer, scored_inputs

from headrace.platform.config import GrpoConfig, LearnerConfig, RlooConfig
from headrace.platform.config.algorithm import AlgorithmOptions, CorrectionConfig, KlConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records import AttemptId, Role, SamplingParams
from headrace.platform.records.message import Task
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.samples import Sample, build_samples

TOLERANCE = 1e-5
VOCABULARY = 64
GROUPS, MEMBERS = 2, 4
TEMPERATURE = 0.7
LONGEST = 64
REWARDS = (1.0, 0.0, 0.25, 0.0, 0.5, 1.0, 1.0, 0.125)
NOISE = 0.3  # in nats, how far behaviour is from the learner: tokens are clipped on both sides


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A small Llama; weights are drawn wide, so that what a token sees matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.2, **shape, **ends)
    return LlamaForCausalLM(config).float()


def episodes(model: torch.nn.Module, noise: float = NOISE, turns: Sequence[int] = (1, 2, 3)) -> list[Played]:
    """Ragged episodes of some of `turns` turns each; every group has a prompt of its own."""
    rng = np.random.default_rng(7)
    prompts = [tuple(rng.integers(2, VOCABULARY, length).tolist()) for length in (5, 12)]
    found = []
    for number in range(GROUPS * MEMBERS):
        spans: list[tuple[bool, tuple[int, ...]]] = []
        for turn in range(int(rng.choice(turns))):
            if turn:
                spans.append((False, tuple(rng.integers(2, VOCABULARY, int(rng.integers(2, 6))).tolist())))
            spans.append((True, (*rng.integers(2, VOCABULARY, int(rng.integers(2, 9))).tolist(), 1)))
        prompt = prompts[number // MEMBERS]
        found.append(_played(model, number, prompt, spans, noise, rng))
    return found


def _played(model, number: int, prompt, spans, noise: float, rng) -> Played:
    """With the model's own logprobs and noise as what the policy's tokens were sampled with."""
    said = [token for _, tokens in spans for token in tokens]
    with torch.no_grad():
        found = logprobs_of(model, [*prompt, *said])
    logprobs = iter(found[len(prompt) - 1 :].tolist())
    parts = []
    for sampled, tokens in spans:
        values = [next(logprobs) + float(rng.normal()) * noise for _ in tokens]
        parts.append((sampled, tokens, tuple(values if sampled else [0.0] * len(tokens))))
    return Played(group=number // MEMBERS, prompt=prompt, spans=tuple(parts), reward=REWARDS[number])


def logprobs_of(model: torch.nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Logprob f32[T - 1] of each token but the first, the plain way."""
    ids = torch.tensor([list(token_ids)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def scored(number: int, one: Played) -> ScoredEpisode:
    """The same as an episode of ours."""
    turns = [plain_turn(Role.USER, token_ids=one.prompt)]
    for sampled, tokens, logprobs in one.spans:
        if sampled:
            turns.append(policy_turn("", tokens, logprobs, sampling=SamplingParams(temperature=TEMPERATURE)))
        else:
            turns.append(plain_turn(Role.TOOL, token_ids=tokens))
    identity = {"attempt_id": AttemptId("parity", one.group, number), "task": Task(f"task-{one.group}", "counter", {})}
    return ScoredEpisode(make_episode(turns, **identity), one.reward)


def samples_of(played: Sequence[Played], config: AlgorithmOptions) -> list[Sample]:
    """Advantages and samples as the learner makes them."""
    algorithm = build_algorithm(config)
    found = []
    for group in range(GROUPS):
        members = [scored(number, one) for number, one in enumerate(played) if one.group == group]
        for member, credit in zip(members, algorithm.advantages(members), strict=True):
            found += build_samples(member.episode, credit)
    return found


def step(model: torch.nn.Module, samples: Sequence[Sample], config: AlgorithmOptions, reference=None):
    """Statistics of our backend's step, and its gradient by parameter before anything is clipped. Where there is a
    `reference`, it is what the run began with."""
    own, gradients = copy.deepcopy(reference or model), {}
    backend = TorchBackend(own, LearnerConfig(algorithm=config, microbatch_tokens=64, clip_grad=1e9))
    own.load_state_dict(model.state_dict())
    for name, parameter in own.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one, name=name: gradients.__setitem__(name, one.grad.clone())
        )
    assert backend.why_padded == ""
    return backend.step(samples, build_algorithm(config)), gradients


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    apart = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    assert max(apart.values()) < TOLERANCE, apart


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


CASES = {
    "token": ({"loss_type": "dapo"}, {}),
    "token-bnpo": ({"loss_type": "bnpo"}, {}),
    "sequence": ({"loss_type": "grpo"}, {"aggregation": "sequence"}),
    "dr-grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": LONGEST},
        {"aggregation": "fixed", "fixed_length": LONGEST, "scale": "none"},
    ),
    "narrow-clip": ({"epsilon": 0.05, "epsilon_high": 0.1}, {"clip_low": 0.05, "clip_high": 0.1}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"aggregation": "sequence", "ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_grpo_off_policy(model, folder, case):
    """Multi-turn episodes of other weights: advantages, loss and gradients."""
    theirs, ours = CASES[case]
    played = episodes(model)
    trainer = grpo_trainer(copy.deepcopy(model), played, folder, **_options(theirs))
    inputs = scored_inputs(trainer, played)
    loss, gradients = loss_and_gradients(trainer, {**inputs, "old_per_token_logps": padded(trainer, played)})

    config = GrpoConfig(**ours)
    samples = samples_of(played, config)
    statistics, own_gradients = step(model, samples, config)
    assert advantage_of_each(samples) == pytest.approx(inputs["advantages"].numpy(), abs=1e-6)
    assert 0 < statistics["clip_share"] < 1
    assert statistics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert_equal_gradients(own_gradients, gradients)


def test_grpo_on_policy(model, folder):
    """TRL is not told what the tokens were sampled with: it takes them for its own."""
    played = episodes(model, noise=0.0)
    trainer = grpo_trainer(copy.deepcopy(model), played, folder, **_options({}))
    loss, gradients = loss_and_gradients(trainer, scored_inputs(trainer, played))
    statistics, own_gradients = step(model, samples_of(played, GrpoConfig()), GrpoConfig())
    assert statistics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert_equal_gradients(own_gradients, gradients)


@pytest.mark.parametrize(("mode", "weights"), [("token_truncate", "token"), ("sequence_truncate", "sequence")])
def test_truncated_weights(model, folder, mode, weights):
    """TRL's correction for what vLLM sampled is our decoupled one: the learner's weights at the start of the batch
    against those that sampled, cut at 1.25."""
    played = episodes(model)
    trainer = grpo_trainer(
        copy.deepcopy(model),
        played,
        folder,
        **_options({"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.25}),
    )
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    inputs = scored_inputs(trainer, played)
    assert float(inputs["importance_sampling_ratio"].max()) == 1.25
    loss, gradients = loss_and_gradients(trainer, inputs)
    config = GrpoConfig(correction=CorrectionConfig(kind="decoupled", weights=weights, cap=1.25))
    statistics, own_gradients = step(model, samples_of(played, config), config)
    assert statistics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert_equal_gradients(own_gradients, gradients)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_kl_and_entropy_in_the_loss(model, folder, aggregation):
    """k3 to a frozen reference, which TRL loads from its folder, and the entropy bonus, which TRL averages over tokens
    whatever the loss does, so it is on with `token` alone."""
    played = episodes(model)
    torch.manual_seed(5)
    reference, policy = copy.deepcopy(model), copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    reference.save_pretrained(f"{folder}/reference")
    policy.config._name_or_path = f"{folder}/reference"
    bonus = 0.01 if aggregation == "token" else 0.0
    theirs = {"loss_type": "dapo" if bonus else "grpo", "beta": 0.3, "entropy_coef": bonus}
    trainer = grpo_trainer(policy, played, folder, **_options(theirs), use_bias_correction_kl=False)
    inputs = scored_inputs(trainer, played) | {"old_per_token_logps": padded(trainer, played)}
    loss, gradients = loss_and_gradients(trainer, inputs)

    config = GrpoConfig(aggregation=aggregation, kl=KlConfig(coefficient=0.3), entropy=bonus)
    statistics, own_gradients = step(model, samples_of(played, config), config, reference)
    assert statistics["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert_equal_gradients(own_gradients, gradients)


def test_a_sequence_without_loss_tokens_counts_for_trl_alone(model, folder):
    """TRL divides by all sequences of the batch, we by those that have a loss token: 8 to 7 here."""
    played = episodes(model)
    first = played[0]
    silent = [(False, tokens, (0.0,) * len(tokens)) for _, tokens, _ in first.spans]
    played[0] = Played(group=first.group, prompt=first.prompt, spans=tuple(silent), reward=first.reward)
    trainer = grpo_trainer(copy.deepcopy(model), played, folder, **_options({"loss_type": "grpo"}))
    inputs = scored_inputs(trainer, played) | {"old_per_token_logps": padded(trainer, played)}
    loss, gradients = loss_and_gradients(trainer, inputs)
    config = GrpoConfig(aggregation="sequence")
    credit = samples_of(episodes(model), config)[1:]  # the silent one is compared with all the same
    statistics, own_gradients = step(model, credit, config)
    assert statistics["loss"] == pytest.approx(loss * 8 / 7, abs=TOLERANCE)
    assert_equal_gradients(own_gradients, {name: one * 8 / 7 for name, one in gradients.items()})


class TestRloo:
    """TRL's RLOO knows one turn: everything after the prompt was sampled. A sequence is one action there, whose ratio
    is the product over its tokens: ours with `ratio=product`, and the mean over sequences.

    By design TRL takes the divergence of whole sequences off rewards before they are compared, `kl.where=reward` what
    is left of them after.
    """

    @pytest.mark.parametrize("noise", [0.0, 0.02, NOISE])
    def test_advantages_loss_and_gradients(self, model, folder, noise):
        played = episodes(model, noise=noise, turns=(1,))
        trainer = rloo_trainer(copy.deepcopy(model), played, folder, temperature=TEMPERATURE, beta=0.0)
        inputs = scored_inputs(trainer, played)
        behaviour = padded(trainer, played).sum(1)
        loss, gradients = loss_and_gradients(trainer, {**inputs, "old_logps": behaviour})
        config = RlooConfig(ratio="product", aggregation="sequence", clip_low=0.2, clip_high=0.2)
        samples = samples_of(played, config)
        statistics, own_gradients = step(model, samples, config)
        assert (statistics["clip_share"] > 0) == (noise == NOISE)
        assert advantage_of_each(samples) == pytest.approx(inputs["advantages"].numpy(), abs=1e-6)
        assert statistics["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert_equal_gradients(own_gradients, gradients)


def advantage_of_each(samples: Sequence[Sample]) -> np.ndarray:
    """One for each sample: all its action tokens have the same."""
    return np.array([one.advantages.max() + one.advantages.min() for one in samples])


def _options(given: dict[str, object]) -> dict[str, object]:
    """TRL's options, at our defaults where the case says nothing."""
    return {"temperature": TEMPERATURE, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", **given}
