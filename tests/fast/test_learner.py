"""The learner's loop over an in-memory ledger and registry: puts, leases, steps, commits, and what is refused."""

import asyncio
import math

import pytest
from learner_kit import RUN, World, tiny_backend
from msgspec.structs import replace

from headrace.platform.config import GrpoConfig
from headrace.platform.errors import RunFailed
from headrace.platform.records import AttemptId, FaultOwner, f32
from headrace.platform.records.delivery import Outcome, Submission
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend


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


async def test_the_last_step_publishes_what_is_left(tmp_path):
    world = World(tmp_path, publish_every=2, steps=3)
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    assert [(await learner.step()).published for _ in range(3)] == [False, True, True]
    assert world.checkpoints.latest_complete()[0].steps == 3


def with_long_mask(episode):
    """An episode whose second turn has a mask longer than its tokens (case T16)."""
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
    await world.play(1, version=0, spoil=lambda episode: b"\xc1 not msgpack")
    await world.play(1, version=0)
    report = await learner.step()
    assert (report.groups, report.dropped) == (1, {"fidelity": 1})


async def test_an_episode_under_another_ones_name_is_dropped(tmp_path):
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
    admission = await world.ledger.admit(0, 2, 2, "worker")
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


async def test_the_status_says_what_the_learner_does_and_waits_for(tmp_path):
    world, said = World(tmp_path, batch_groups=2), []
    world.part.set = lambda state, waiting_for="": said.append((state, waiting_for))
    learner = world.learner()
    await learner.start()
    await world.play(1, version=0)
    (late,) = await world.admit(1, 0)
    step = asyncio.create_task(learner.step())
    await asyncio.sleep(0)
    assert world.part.status().detail == {"ready": 1, "playing": 1}
    await world.finish(late)
    await step
    assert list(dict.fromkeys(said)) == [
        ("starting", "the run, from its last learner"),
        ("publishing version 0", ""),
        ("writing checkpoint 0", ""),
        ("step 1", "a batch of 2 groups"),
        ("training step 1", ""),
        ("publishing version 1", ""),
        ("step 1 done", "the next step"),
    ]
