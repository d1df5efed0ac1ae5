"""What the learner computes is what the engine recorded, on real episodes; and the order of arrival changes nothing."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from run_kit import run_inprocess, small_config, stored
from safetensors.torch import load_file

from headrace.actors.environments.lookup.vocabulary import build_tokenizer
from headrace.deploy.context import RunContext
from headrace.deploy.wiring import assemble_learner
from headrace.platform.config import LearnerConfig
from headrace.platform.hashing import digest
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import Outcome, Submission
from headrace.platform.records.status import FinishReason, Purpose, Role
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.samples import build_samples

TOKENIZER = build_tokenizer()
ASSISTANT, END = TOKENIZER.token_to_id("<asst>"), TOKENIZER.token_to_id("<end>")
TEMPERATURES = (1.0, 0.7)


@pytest.fixture(scope="module", params=TEMPERATURES, ids=["T=1", "T=0.7"])
def run(request, lookup_model, tmp_path_factory):
    """A finished run that kept a checkpoint of every version, and its temperature."""
    config = small_config(
        lookup_model,
        tmp_path_factory.mktemp("runs"),
        "learner.checkpoint_every=1",
        "learner.keep_checkpoints=9",
        f"environments.0.sampling.temperature={request.param}",
    )
    _, root = run_inprocess(config)
    return root, request.param


def samples_of(episode):
    return build_samples(episode, [0.0] * sum(turn.is_action for turn in episode.turns))


def test_learner_and_engine_agree_on_every_sampled_token(run):
    root, temperature = run
    by_version: dict[int, list] = {}
    for episode in stored(root):
        by_version.setdefault(episode.version.number, []).append(episode)
    assert len(by_version) >= 3, "several versions sampled"
    compared = 0
    for version, episodes in by_version.items():
        backend = TorchBackend(Path(root.url) / "checkpoints" / f"{version:06d}", LearnerConfig())
        samples = [sample for episode in episodes for sample in samples_of(episode)]
        for sample, logprobs in zip(samples, backend.logprobs(samples), strict=True):
            sampled = sample.action_mask == 1
            assert set(sample.temperatures[sampled].tolist()) == {np.float32(temperature)}
            assert np.abs(logprobs - sample.behaviour_logprobs)[sampled].max() <= 1e-4, sample.episode_id
            compared += int(sampled.sum())
    assert compared > 500


def test_other_weights_would_be_noticed(run):
    """The tolerance above tells versions apart."""
    root, _ = run
    last = Path(root.url) / "checkpoints" / "000003"
    samples = [s for e in stored(root) if e.version.number == 0 for s in samples_of(e)]
    found = TorchBackend(last, LearnerConfig()).logprobs(samples)
    worst = max(
        np.abs(logprobs - sample.behaviour_logprobs)[sample.action_mask == 1].max()
        for sample, logprobs in zip(samples, found, strict=True)
    )
    assert worst > 1e-2


def test_nothing_but_sampled_tokens_has_mask_1(run):
    """Judged by reading the tokens: after `<asst>` up to and including the next `<end>` the policy speaks."""
    root, _ = run
    episodes = stored(root)
    for episode in episodes:
        for turn in episode.turns:
            if turn.role is not Role.ASSISTANT:
                assert not turn.action_mask.any() and not turn.behaviour_logprobs.any()
        assert episode.action_tokens == episode.cost.sampled_tokens
        if any(turn.finish_reason is FinishReason.LENGTH for turn in episode.turns):
            continue
        expected, speaking = [], False
        for token in np.concatenate([turn.token_ids for turn in episode.turns]).tolist():
            expected.append(int(speaking))
            speaking = token != END if speaking else token == ASSISTANT
        assert np.concatenate([turn.action_mask for turn in episode.turns]).tolist() == expected, episode.episode_id
    assert any(turn.role is Role.TOOL for episode in episodes for turn in episode.turns)
    assert {episode.purpose for episode in episodes} == {Purpose.TRAIN, Purpose.EVAL}


def test_the_text_of_the_world_is_in_the_tokens(run):
    """Prompts and observations are those that the world gave, word for word."""
    root, _ = run
    for episode in stored(root):
        text = TOKENIZER.decode(
            np.concatenate([turn.token_ids for turn in episode.turns]).tolist(), skip_special_tokens=False
        )
        assert text.startswith(f"<user>find {episode.task.data['chain'][0]}<end>")
        for turn in episode.turns:
            if turn.role is Role.TOOL and "=" in turn.content:
                assert f"<tool>{turn.content}<end>" in text


class TestOrderOfArrival:  # case V6
    """The same episodes, whole group after whole group as a synchronous loop would bring them, and member by member in
    a scrambled order as an asynchronous one does, at lag 0."""

    @pytest.fixture
    def groups(self, lookup_model, tmp_path):
        """Groups of the first version whose members differ in score: what one batch trains on."""
        _, root = run_inprocess(small_config(lookup_model, tmp_path / "played", "learner.steps=1"))
        rewards = RewardTable(root.url).by_episode()
        groups: dict[int, list] = {}
        for episode in stored(root):
            if episode.purpose is Purpose.TRAIN and episode.version.number == 0:
                score = sum(row.value for row in rewards[episode.episode_id])
                groups.setdefault(episode.attempt_id.group, []).append((episode, score))
        return [group for group in groups.values() if len({score for _, score in group}) > 1]

    def train(self, groups, order, lookup_model, tmp_path, name):
        """One learner step on `groups` put in `order`; the report and the weights."""
        config = small_config(
            lookup_model, tmp_path, f"learner.batch_groups={len(groups)}", "learner.warmup=0", "learner.lr=1e-2"
        )
        root = RunRoot.create(str(tmp_path), name, "")
        context = RunContext(run="order", root=root.url, config=config)

        async def step():
            ledger = MemoryLedger("order", context.limits, lambda: 0.0)
            registry = MemoryRegistry(ledger)
            learner = assemble_learner(context, lookup_model, ledger, registry, inline=True)
            await learner.start()
            tickets = (await ledger.admit(0, len(groups[0]), len(groups), "worker")).tickets
            assert len(tickets) == len(groups)
            for g, s in order:
                episode, score = groups[g][s]
                attempt = msgspec.structs.replace(episode.attempt_id, run="order", group=tickets[g].group)
                payload = episode_codec.encode(msgspec.structs.replace(episode, attempt_id=attempt))
                done = Submission(
                    attempt_id=attempt,
                    outcome=Outcome.DONE,
                    payload=payload,
                    payload_hash=digest(payload),
                    score=score,
                    oldest_version=0,
                    action_tokens=episode.action_tokens,
                )
                await ledger.put([done])
            report = await learner.step()
            _, folder = await registry.open(learner.version)
            return report, load_file(Path(folder) / "model.safetensors")

        return asyncio.run(step())

    def test_gradients_are_the_same(self, groups, lookup_model, tmp_path):
        assert len(groups) >= 3
        whole = [(g, s) for g in range(len(groups)) for s in range(len(groups[0]))]
        scrambled = [whole[i] for i in np.random.default_rng(0).permutation(len(whole))]
        first_done = list(range(len(groups)))
        finished = sorted(range(len(groups)), key=lambda g: max(i for i, (h, _) in enumerate(scrambled) if h == g))
        assert finished != first_done, "the groups become ready in another order"
        report, weights = self.train(groups, whole, lookup_model, tmp_path, "sync")
        other, other_weights = self.train(groups, scrambled, lookup_model, tmp_path, "async")
        assert report.lags == other.lags == {0: len(whole)}
        assert report.loss_tokens == other.loss_tokens
        assert report.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
        assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        before = load_file(lookup_model / "model.safetensors")
        moved = max(float((weights[name] - before[name]).abs().max()) for name in weights)
        assert moved > 1e-3
        for name in weights:
            torch.testing.assert_close(weights[name], other_weights[name], rtol=1e-4, atol=1e-5)
