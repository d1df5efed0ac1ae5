"""The environment-token loss: which tokens of an episode it is over, and what it comes to."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from rendering_kit import family_renderer
from test_packing import model_of, sample

from headrace.actors.rendering.content import ContentFinder
from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, Role
from headrace.platform.records.status import Status
from headrace.platform.records.turn import ToolCallRecord, View
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.observations import observation_spans
from headrace.trainer.samples import build_samples

CALL = ToolCallRecord(index=0, call_id="call_0", name="get")
DENIED = ToolCallRecord(index=0, call_id="call_0", name="get", decision="deny")
FAMILIES = ("qwen3", "qwen3-coder", "qwen3.5", "llama-3", "deepseek-v3")


def middle(turn, before):
    """A template with one token before the content and one after it."""
    return (1, len(turn.token_ids) - 1)


def tool(*token_ids, **fields):
    return plain_turn(Role.TOOL, "x", token_ids, **fields)


class TestWhichTokens:
    def test_the_content_of_answers_and_nothing_else(self):
        # user 3, action 2, tool 4, action 1, user 3, action 1, tool 3
        turns = (
            plain_turn(Role.USER, token_ids=[1, 2, 3]),
            policy_turn("a", [4, 5], tool_calls=(CALL,)),
            tool(6, 7, 8, 9),
            policy_turn("b", [10]),
            plain_turn(Role.USER, token_ids=[11, 12, 13]),
            policy_turn("c", [14], tool_calls=(CALL,)),
            tool(15, 16, 17),
        )
        (one,) = build_samples(make_episode(turns), [1.0] * 3, content=middle)
        assert one.token_ids[one.observation_mask == 1].tolist() == [7, 8, 16]
        assert not (one.observation_mask & one.action_mask).any()  # case T7
        assert one.loss_tokens == 4

    @pytest.mark.parametrize(
        ("calls", "status"),
        [
            ((), Status.OK),  # nobody was asked: the platform itself explains something
            ((CALL,), Status.MODEL_INVALID_ACTION),
            ((DENIED,), Status.OK),
            ((CALL, CALL), Status.OK),  # several answers in one turn: which token is whose is not recorded
        ],
        ids=["no call", "a call that could not be read", "a call that was denied", "several calls"],
    )
    def test_what_the_environment_did_not_write_as_one_answer_is_left_out(self, calls, status):
        turns = (plain_turn(Role.USER), policy_turn("a", tool_calls=calls), tool(6, 7, 8, status=status))
        assert observation_spans(make_episode(turns), middle) == {}

    def test_a_turn_whose_content_cannot_be_told_is_left_out(self):
        turns = (plain_turn(Role.USER), policy_turn("a", tool_calls=(CALL,)), tool(6, 7, 8))
        assert observation_spans(make_episode(turns), lambda turn, before: None) == {}

    def test_a_token_that_two_contexts_show_counts_once(self):
        turns = (
            plain_turn(Role.USER),
            policy_turn("a", tool_calls=(CALL,)),
            tool(6, 7, 8),
            plain_turn(Role.USER, agent_id="other"),
            policy_turn("b", segment=1),
        )
        views = (View(1, ((0, 1),)), View(4, ((0, 3),), segment=1))
        first, second = build_samples(make_episode(turns, views=views), [1.0, 1.0], content=middle)
        assert first.observation_mask.sum() == 1 and second.observation_mask.sum() == 0
        assert 7 in second.token_ids

    def test_without_a_finder_no_sample_is_marked(self):
        assert build_samples(make_episode(), [1.0])[0].observation_mask is None


@functools.cache
def finder_of(family: str) -> ContentFinder:
    return ContentFinder(family_renderer(family))


def observed(renderer, *messages, ended=True):
    """A recorded turn and the policy's before it."""
    stop = renderer.stop_token_ids[0]
    before = policy_turn("a", [1, 2, stop] if ended else [1, 2])
    text = "\n".join(message.content for message in messages)
    ids = renderer.bridge(messages, ended)
    return plain_turn(messages[0].role, text, ids, tool_call_id=messages[0].tool_call_id), before


class TestContent:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("text", ["42", "a longer answer, with <|im_end|> in it", "to us, user"])
    def test_the_span_is_the_text_and_no_token_of_the_template(self, family, text):
        renderer, finder = family_renderer(family), finder_of(family)
        turn, before = observed(renderer, Message(Role.TOOL, text, tool_call_id="call_0"))
        start, end = finder.span(turn, before)
        assert renderer.decode(turn.token_ids[start:end].tolist()) == text

    def test_several_messages_and_other_tokens_tell_nothing(self):
        renderer, finder = family_renderer("qwen3"), finder_of("qwen3")
        one = Message(Role.TOOL, "42", tool_call_id="call_0")
        assert finder.span(*observed(renderer, one, one)) is None
        turn, before = observed(renderer, one)
        other = plain_turn(Role.TOOL, "42", [9, *turn.token_ids.tolist()], tool_call_id="call_0")
        assert finder.span(other, before) is None

    @pytest.mark.parametrize("family", ["deepseek-r1", "gpt-oss"])
    def test_a_family_that_writes_history_anew_is_refused(self, family):
        with pytest.raises(ConfigError, match="writes history anew"):
            finder_of(family)

    def test_a_template_that_hides_what_tools_say_is_refused(self):
        class Hides:
            stop_token_ids = (1,)

            def bridge(self, messages, ended):
                return [7, 8]

            def decode(self, token_ids):
                return "w"

        with pytest.raises(ConfigError, match=r"learner\.environment_loss"):
            ContentFinder(Hides())


def batch(seed: int = 0):
    """Three samples whose tokens that are no actions, but for the first two, were sent by the environment."""
    rng = np.random.default_rng(seed)
    found = []
    for n in range(3):
        one = sample(f"e{n}", rng.integers(2, 24, 12 + 3 * n).tolist(), 10 * seed + n, advantage=1.0 - n)
        mask = (1 - one.action_mask).astype(np.uint8)
        mask[:2] = 0
        ones = np.ones(one.length, np.float32)
        found.append(dataclasses.replace(one, observation_mask=mask, temperatures=ones))
    return found


def backend(coefficient: float, microbatch_tokens: int = 512, **options) -> TorchBackend:
    settings = {"environment_loss": {"coefficient": coefficient}, "clip_grad": 1e9, **options}
    return TorchBackend(model_of("llama_gqa"), LearnerConfig(microbatch_tokens=microbatch_tokens, **settings))


def cross_entropy(samples) -> float:
    """By a plain forward pass over each sample."""
    model, terms = model_of("llama_gqa"), []
    for one in samples:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        terms.append(-logprobs[torch.from_numpy(one.observation_mask[1:] == 1)])
    return float(torch.cat(terms).mean())


class TestLoss:
    def test_it_is_the_mean_over_observation_tokens_times_its_coefficient(self):
        plain = backend(0.0).step(batch(), build_algorithm(GrpoConfig()))
        both = backend(0.25).step(batch(), build_algorithm(GrpoConfig()))
        expected = cross_entropy(batch())
        assert both["environment_loss"] == pytest.approx(expected, rel=1e-5)
        assert both["loss"] - plain["loss"] == pytest.approx(0.25 * expected, rel=1e-4)
        same = ("ratio_mean", "kl", "clip_share", "loss_tokens")
        assert [both[name] for name in same] == pytest.approx([plain[name] for name in same], rel=1e-5)
        assert "environment_loss" not in plain

    def test_its_denominator_is_its_own(self):
        """Half of the policy's loss tokens leave; the environment's mean does not move."""
        fewer = []
        for one in batch():
            loss = one.loss_mask.copy()
            loss[: len(loss) // 2] = 0
            fewer.append(dataclasses.replace(one, loss_mask=loss))
        algorithm = build_algorithm(GrpoConfig())
        whole, half = (backend(0.25).step(samples, algorithm) for samples in (batch(), fewer))
        assert half["loss_tokens"] < whole["loss_tokens"]
        assert half["environment_loss"] == pytest.approx(whole["environment_loss"], rel=1e-5)

    @pytest.mark.parametrize("how", ["small microbatches", "padded"])
    def test_the_weights_after_a_step_do_not_depend_on_how_samples_are_packed(self, how):  # case V6
        one = backend(0.25)
        other = backend(0.25, 16 if how == "small microbatches" else 512)
        if how == "padded":
            other._token_logprobs.why_padded = "the test says so"
        for found in (one, other):
            found.step(batch(), build_algorithm(GrpoConfig()))
        for first, second in zip(one.logprobs(batch(1)), other.logprobs(batch(1)), strict=True):
            np.testing.assert_allclose(first, second, atol=2e-4)

    def test_without_observations_it_is_nothing(self):
        samples = [dataclasses.replace(one, observation_mask=None) for one in batch()]
        algorithm = build_algorithm(GrpoConfig())
        assert dict(backend(0.25).step(samples, algorithm)) == dict(backend(0.0).step(samples, algorithm))

    def test_it_is_learned(self):
        learning = backend(1.0, lr=1e-2, warmup=0)
        algorithm = build_algorithm(GrpoConfig())
        losses = [learning.step(batch(), algorithm)["environment_loss"] for _ in range(8)]
        assert losses[-1] < 0.7 * losses[0]

    def test_entropy_and_a_reference_are_the_policy_tokens_own(self):
        options = {"algorithm": GrpoConfig(entropy=0.01, kl={"coefficient": 0.1})}
        algorithm = build_algorithm(options["algorithm"])
        plain, both = (backend(c, **options).step(batch(), algorithm) for c in (0.0, 0.25))
        assert both["entropy"] == pytest.approx(plain["entropy"], rel=1e-5)
        assert both["reference_kl"] == pytest.approx(plain["reference_kl"], abs=1e-6)
