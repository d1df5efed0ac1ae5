"""The learner's loop over an in-memory ledger and registry: puts, leases, steps, commits, and how it ends."""

import asyncio
import hashlib
import math

import numpy as np
import pytest

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.errors import Fenced, RunFailed
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import AttemptId, FaultOwner, Role, f32
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import LedgerLimits, Outcome, Submission
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.learner import Learner
from headrace.trainer.model import build_tiny_llama

RUN = "test-run"
SCORES = (1.0, 0.0)


class Clock:
    """Time that moves only when a test says so, and a little at each look."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


class World:
    """A ledger, a registry, a store of payloads, and a worker that plays scripted episodes."""

    def __init__(self, tmp_path, *, max_lag: int = 4, batch_groups: int = 2, limits=None, **config) -> None:
        self.clock = Clock()
        self.max_lag = max_lag
        self.config = LearnerConfig(batch_groups=batch_groups, **config)
        given = {"batch_groups": batch_groups, "max_lag": max_lag, "group_deadline_s": 1e9, "learner_lease_s": 1e9}
        self.ledger = MemoryLedger(RUN, LedgerLimits(**{**given, **(limits or {})}), self.clock)
        self.registry = MemoryRegistry(self.ledger, self.clock)
        self.checkpoints = CheckpointStore(str(tmp_path / "checkpoints"))
        self.receipts = []
        self.stored: dict[str, bytes] = {}
        self.reads: list[str] = []

    def learner(self, backend=None, algorithm=None, **options) -> Learner:
        return Learner(
            run=RUN,
            config=self.config,
            max_lag=self.max_lag,
            backend=backend or FakeBackend(),
            algorithm=algorithm or FakeAlgorithm(),
            ledger=self.ledger,
            registry=self.registry,
            read_episodes=self.read,
            checkpoints=self.checkpoints,
            policy_id="policy",
            clock=self.clock,
            on_receipts=self.receipts.extend,
            **{"inline": True, **options},
        )

    async def read(self, store_file, ids):
        self.reads.append(store_file)
        return [self.stored[name] for name in ids]

    async def play(self, groups: int, version: int, scores=SCORES, spoil=None) -> list[int]:
        """Admit `groups` groups and put every episode of them; returns their numbers."""
        admission = await self.ledger.admit(version, len(scores), groups)
        assert len(admission.tickets) == groups, admission.refusal
        for ticket in admission.tickets:
            for sample, score in enumerate(scores):
                await self.put(ticket.group, sample, version, score, spoil)
        return [ticket.group for ticket in admission.tickets]

    async def put(self, group, sample, version, score, spoil=None) -> None:
        rng = np.random.default_rng([group, sample])
        turns = (
            plain_turn(Role.USER, token_ids=[2, 3, 4]),
            policy_turn("a", rng.integers(2, 20, 3), logprobs=[-2.0, -3.0, -4.0], version=version),
            plain_turn(Role.TOOL, token_ids=[5]),
            policy_turn("b", rng.integers(2, 20, 2), logprobs=[-3.0, -2.0], version=version),
        )
        episode = make_episode(turns, version=version, attempt_id=AttemptId(RUN, group, sample))
        payload = episode_codec.encode(spoil(episode) if spoil else episode)
        self.stored[episode.episode_id] = payload
        submission = Submission(
            attempt_id=episode.attempt_id,
            outcome=Outcome.DONE,
            payload=payload,
            payload_hash=hashlib.sha256(payload).hexdigest(),
            store_file=f"episodes/g{group}.parquet",
            score=score,
            oldest_version=version,
            action_tokens=5,
        )
        await self.ledger.put([submission])


def tiny_backend(config: LearnerConfig) -> TorchBackend:
    shape = TinyLlamaConfig(hidden=32, layers=1, heads=2, intermediate=32, max_positions=32)
    return TorchBackend(build_tiny_llama(shape, 20, 0, pad_token_id=0, eos_token_id=1), config)


async def test_from_put_to_version_1_with_a_real_model(tmp_path):
    world = World(tmp_path)
    backend = tiny_backend(world.config)
    learner = world.learner(backend, build_algorithm(GrpoConfig()), inline=False)
    assert await learner.start() == 0
    before = backend.weights()
    groups = await world.play(2, version=0)
    report = await learner.step()

    assert (report.step, report.version, report.batches, report.published) == (1, 1, 1, True)
    assert (report.groups, report.episodes, report.loss_tokens) == (2, 4, 20)
    assert report.score_mean == 0.5
    assert report.lags == {0: 4}
    assert report.dropped == {}
    assert math.isfinite(report.loss)
    assert report.busy_s > 0

    stats = await world.ledger.stats()
    assert (stats.head, stats.head_batches, stats.groups_consumed) == (1, 1, 2)
    assert stats.fates == {"trained": 4, "in_flight": 0}
    assert stats.holds

    manifest, folder = await world.registry.open(1)
    assert (manifest.parent, manifest.batches, manifest.kind, manifest.fence) == (0, 1, "full", 1)
    assert manifest.parent_hash == (await world.registry.open(0))[0].content_hash
    assert manifest.consumed == {f"{RUN}.t{g}.{s}.0": "trained" for g in groups for s in (0, 1)}
    assert manifest.episode_files == ("episodes/g0.parquet", "episodes/g1.parquet")
    assert (await world.registry.open(0))[0].consumed == {}
    assert backend.weights() != before

    from transformers import AutoModelForCausalLM

    served = TorchBackend(AutoModelForCausalLM.from_pretrained(folder), world.config)
    assert served.weights()["model.safetensors"] == backend.weights()["model.safetensors"]


async def test_receipts_tell_how_each_episode_was_trained(tmp_path):
    world = World(tmp_path)
    learner = world.learner(tiny_backend(world.config), build_algorithm(GrpoConfig(epsilon=1e-9)))
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    first, second, *_ = world.receipts
    assert (first.episode_id, first.version, first.lag, first.loss_tokens) == (f"{RUN}.t0.0.0", 1, 0, 5)
    assert first.advantages == pytest.approx((1 / math.sqrt(2),) * 2)
    assert second.advantages == pytest.approx((-1 / math.sqrt(2),) * 2)
    assert len(world.receipts) == 4
    assert all(r.ratio_mean > 0 and 0 <= r.clip_share <= 1 for r in world.receipts)


async def test_the_same_seed_gives_the_same_loss_to_the_last_digit(tmp_path):
    losses = []
    for attempt in range(2):
        world = World(tmp_path / str(attempt))
        learner = world.learner(tiny_backend(world.config), build_algorithm(GrpoConfig()))
        await learner.start()
        for version in range(3):
            await world.play(2, version=version)
            losses.append((attempt, (await learner.step()).loss))
    assert [loss for a, loss in losses if a == 0] == [loss for a, loss in losses if a == 1]
    assert len({loss for _, loss in losses}) == 3


async def test_ready_groups_beyond_the_batch_stay_queued(tmp_path):
    """case Q8"""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.play(5, version=0)
    report = await learner.step()
    assert report.groups == 2
    assert (await world.ledger.stats()).groups_ready == 3


async def test_lags_are_counted_in_learner_batches(tmp_path):
    """P14: episodes of version 0, trained at the second and third batch, have lags 1 and 2."""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    assert [(await learner.step()).lags for _ in range(3)] == [{0: 4}, {1: 4}, {2: 4}]


async def test_what_is_over_the_limit_is_never_trained(tmp_path):
    """case Q11: a group that waited while the head moved on is dropped, and the learner takes the fresh ones."""
    world = World(tmp_path, max_lag=1)
    learner = world.learner()
    await learner.start()
    await world.play(4, version=0)
    await learner.step()
    await learner.step()
    stats = await world.ledger.stats()
    assert stats.fates["trained"] == 8
    await world.play(2, version=2)
    report = await learner.step()
    assert report.lags == {0: 4}


async def test_the_learner_judges_lag_for_itself(tmp_path):
    """P14, at train start: a ledger with a laxer limit does not make the learner train on older episodes."""
    world = World(tmp_path, max_lag=1, limits={"max_lag": 4})
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    await learner.step()
    await learner.step()
    await world.play(2, version=2)
    report = await learner.step()
    assert (report.dropped, report.lags) == ({"lag": 2}, {0: 4})
    stats = await world.ledger.stats()
    assert stats.fates == {"trained": 12, "in_flight": 0, "dropped:lag": 4}


async def test_publishing_every_second_step(tmp_path):
    """P14: unpublished batches count as lag; one commit consumes both steps' groups."""
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(4, version=0)
    first, second = await learner.step(), await learner.step()
    assert (first.version, first.published, first.batches, first.lags) == (0, False, 1, {0: 4})
    assert (second.version, second.published, second.batches, second.lags) == (1, True, 2, {1: 4})
    stats = await world.ledger.stats()
    assert (stats.head_batches, stats.fates["trained"], stats.groups_leased) == (2, 8, 0)
    assert len(world.receipts) == 8


async def test_the_last_step_publishes_what_is_left(tmp_path):
    world = World(tmp_path, publish_every=2, steps=3)
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    assert [(await learner.step()).published for _ in range(3)] == [False, True, True]
    assert world.checkpoints.latest_complete()[0].steps == 3


async def test_close_gives_back_what_was_not_published(tmp_path):
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    await learner.close()
    await learner.close()
    stats = await world.ledger.stats()
    assert (stats.groups_leased, stats.groups_ready) == (0, 2)
    assert stats.holds


def with_long_mask(episode):
    """An episode whose second turn has a mask longer than its tokens (case T16)."""
    from msgspec.structs import replace

    turns = list(episode.turns)
    turns[1] = replace(turns[1], behaviour_logprobs=f32([-1.0] * 9))
    return replace(episode, turns=tuple(turns))


async def test_a_group_that_does_not_hold_together_is_dropped_and_the_step_goes_on(tmp_path):
    """case T16: refused with a reason, never padded; its siblings are trained."""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.play(1, version=0, spoil=with_long_mask)
    await world.play(1, version=0)
    report = await learner.step()
    assert (report.groups, report.dropped) == (1, {"fidelity": 1})
    stats = await world.ledger.stats()
    assert stats.fates == {"trained": 2, "in_flight": 0, "dropped:fidelity": 2}
    assert stats.holds


async def test_bytes_that_are_no_episode_are_dropped_too(tmp_path):
    world = World(tmp_path, batch_groups=1)
    learner = world.learner()
    await learner.start()
    (bad,) = await world.play(1, version=0, spoil=lambda episode: episode)
    world.ledger._books.groups[bad].slots[0].payload = b"\xc1 not msgpack"
    await world.play(1, version=0)
    report = await learner.step()
    assert (report.groups, report.dropped) == (1, {"fidelity": 1})


async def test_an_episode_under_another_ones_name_is_dropped(tmp_path):
    from msgspec.structs import replace

    world = World(tmp_path, batch_groups=1)
    learner = world.learner()
    await learner.start()
    await world.play(1, version=0, spoil=lambda episode: replace(episode, attempt_id=AttemptId(RUN, 99, 0)))
    await world.play(1, version=0)
    assert (await learner.step()).dropped == {"fidelity": 1}


async def test_no_batch_within_the_deadline_fails_by_name(tmp_path):
    """cases E8, E9: the message says what the queue looked like."""
    world = World(tmp_path, batch_deadline_s=0.5)
    learner = world.learner()
    await learner.start()
    admission = await world.ledger.admit(0, 2, 2)
    await world.ledger.put(
        [
            Submission(
                attempt_id=AttemptId(RUN, admission.tickets[0].group, sample),
                outcome=Outcome.FAILED,
                owner=FaultOwner.ENVIRONMENT,
            )
            for sample in (0, 1)
        ]
    )
    with pytest.raises(RunFailed, match=r"no batch of 2 groups.*1 groups being played, 0 ready.*failed:environment 2"):
        await learner.step()


async def test_a_stopped_run_does_not_wait_for_the_deadline(tmp_path):
    """A run that was stopped before its learner started admits nothing, so no batch can come."""
    world = World(tmp_path)
    await world.ledger.stop("enough")
    learner = world.learner()
    await learner.start()
    with pytest.raises(RunFailed, match="stopped"):
        await learner.step()


async def test_a_learner_whose_run_was_stopped_is_fenced(tmp_path):
    """The next step learns of it at once."""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.ledger.stop("enough")
    with pytest.raises(Fenced, match="stopped"):
        await learner.step()


async def test_closing_after_a_stop_only_logs(tmp_path, caplog):
    """The stop dropped what the learner held, so that its release is refused and nothing comes back."""
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    assert (await world.ledger.stats()).groups_leased == 2
    await world.ledger.stop("enough")
    await learner.close()
    assert "could not release groups [0, 1]" in caplog.text
    stats = await world.ledger.stats()
    assert (stats.fates["dropped:stopped"], stats.fates["in_flight"], stats.holds) == (4, 0, True)


async def test_a_converged_policy_still_steps(tmp_path):
    """P20: after oversample_max batches' worth of zero-variance groups, one ready group is a batch."""
    world = World(tmp_path, batch_groups=2, oversample_max=1.0)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0, scores=(1.0, 1.0))
    await world.play(1, version=0)
    report = await learner.step()
    assert (report.groups, report.version) == (1, 1)
    assert (await world.ledger.stats()).fates["dropped:zero_variance"] == 4


async def test_a_batch_that_arrives_late_is_trained(tmp_path):
    """The learner waits, in the threaded form, and is unblocked by the put."""
    world = World(tmp_path)
    learner = world.learner(inline=False)
    await learner.start()
    step = asyncio.create_task(learner.step())
    await world.play(1, version=0)
    await world.play(1, version=0)
    assert (await step).version == 1


async def test_a_step_that_is_not_finite_fails_and_names_the_episodes(tmp_path):
    class Poison(FakeAlgorithm):
        def advantages(self, group):
            return [[float("nan")] * 2 if one.score == 1.0 else [0.0] * 2 for one in group]

    world = World(tmp_path)
    backend = FakeBackend()
    learner = world.learner(backend, Poison())
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(RunFailed, match=rf"not finite.*{RUN}\.t0\.0\.0, {RUN}\.t1\.0\.0"):
        await learner.step()
    assert backend.weight == FakeBackend().weight
    assert (await world.ledger.stats()).head == 0


async def test_a_learner_that_lost_the_run_is_fenced(tmp_path):
    """case Q18: another learner takes over while the old one computes; the old one cannot commit any more."""
    world = World(tmp_path)
    loop = asyncio.get_running_loop()
    new = world.learner()

    class Overtaken(FakeBackend):
        def step(self, batch, algorithm):
            asyncio.run_coroutine_threadsafe(new.start(), loop).result()
            return super().step(batch, algorithm)

    old = world.learner(Overtaken(), inline=False)
    await old.start()
    await world.play(2, version=0)
    with pytest.raises(Fenced):
        await old.step()
    await old.close()
    stats = await world.ledger.stats()
    assert (stats.head, stats.fence, stats.groups_ready, stats.holds) == (0, 2, 2, True)
    assert (await new.step()).version == 1
    assert (await world.ledger.stats()).fates == {"trained": 4, "in_flight": 0}
    with pytest.raises(Fenced):
        await old.step()


async def test_a_new_learner_goes_on_from_the_newest_checkpoint(tmp_path):
    """case Q1: what the checkpoint settled never comes again; what was only published comes once more."""
    world = World(tmp_path, checkpoint_every=2)
    first = FakeBackend()
    learner = world.learner(first)
    await learner.start()
    await world.play(8, version=0)
    for _ in range(2):
        await learner.step()
    weight = first.weight
    await learner.step()

    second = FakeBackend(weight=9.0)
    heir = world.learner(second)
    assert await heir.start() == 2
    assert (second.weight, heir.steps) == (weight, 2)
    assert (await world.ledger.stats()).fates["trained"] == 8
    report = await heir.step()
    assert (report.version, report.batches, report.step) == (4, 3, 3)
    assert second.calls == first.calls[2:]
    await heir.step()
    stats = await world.ledger.stats()
    assert stats.fates == {"trained": 16, "in_flight": 0}
    assert world.reads == ["episodes/g4.parquet", "episodes/g5.parquet"]
    assert stats.holds


async def test_checkpoints_settle_and_old_weights_are_removed(tmp_path):
    world = World(tmp_path, checkpoint_every=3, keep_versions=1)
    learner = world.learner()
    await learner.start()
    for version in range(4):
        await world.play(2, version=version)
        await learner.step()
    state, files = world.checkpoints.latest_complete()
    assert (state.version, state.batches, state.steps, state.dispatch_sequence) == (3, 3, 3, 6)
    assert set(files) == {"config.json", "model.safetensors", "state.json"}
    assert (await world.ledger.stats()).groups_consumed == 2
    for version, kept in [(0, True), (1, False), (2, False), (3, True), (4, True)]:
        if kept:
            assert (await world.registry.open(version))[0].ref.number == version
        else:
            with pytest.raises(LookupError):
                await world.registry.open(version)


async def test_leases_are_extended_while_a_step_computes(tmp_path):
    """A step that outlasts the lease twice over still commits."""
    world = World(tmp_path, limits={"learner_lease_s": 10.0})
    loop = asyncio.get_running_loop()

    extended = asyncio.Event()
    extend = world.ledger.extend

    async def recorded(fence, groups):
        await extend(fence, groups)
        extended.set()

    async def six_seconds_and_a_renewal():
        extended.clear()
        world.clock.now_s += 6.0
        await extended.wait()

    class Slow(FakeBackend):
        def step(self, batch, algorithm):
            for _ in range(4):
                asyncio.run_coroutine_threadsafe(six_seconds_and_a_renewal(), loop).result()
            return super().step(batch, algorithm)

    world.ledger.extend = recorded
    learner = world.learner(Slow(), inline=False, extend_every_s=1e-3)
    await learner.start()
    await world.play(2, version=0)
    assert (await learner.step()).version == 1


async def test_leases_are_renewed_between_steps_that_publish_nothing(tmp_path):
    world = World(tmp_path, publish_every=3, limits={"learner_lease_s": 10.0})
    learner = world.learner()
    await learner.start()
    for _ in range(3):
        await world.play(2, version=0)
        await learner.step()
        world.clock.now_s += 6.0
    assert (await world.ledger.stats()).fates == {"trained": 12, "in_flight": 0}


async def test_a_group_whose_lease_ran_out_is_not_trained_again(tmp_path):
    """P1: it went back to the queue, and the same learner leases it once more."""
    world = World(tmp_path, publish_every=2, limits={"learner_lease_s": 10.0})
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    world.clock.now_s += 11.0
    with pytest.raises(RunFailed, match=r"leases of groups \[0, 1\] ran out"):
        await learner.step()
    assert world.receipts == []
