"""A learner that dies anywhere is followed by one that goes on as if it had not (P5, P6)."""

import asyncio

import pytest
from learner_kit import RUN, World, tiny_backend

from headrace.platform.config import GrpoConfig
from headrace.platform.testing.fakes.learning import FakeBackend
from headrace.trainer.algorithms import build_algorithm


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
    assert await heir.start(takeover=True) == 2
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
    assert set(files) == {"config.json", "model.safetensors", "state.json", "algorithm.json"}
    assert (await world.ledger.stats()).groups_consumed == 2
    for version, kept in [(0, True), (1, False), (2, False), (3, True), (4, True)]:
        if kept:
            assert (await world.registry.open(version))[0].ref.number == version
        else:
            with pytest.raises(LookupError):
                await world.registry.open(version)


STEPS = 6


class Killed(Exception):
    """Stands for SIGKILL at a failpoint: nothing of the learner runs after it but its own unwinding."""


def kill_at(monkeypatch, point: str, passing: int) -> list[str]:
    """Die at the `passing`-th passing of `point`, once. Returns the points that were passed."""
    passed: list[str] = []

    def failpoint(name):
        passed.append(name)
        if name == point and passed.count(point) == passing:
            raise Killed(f"{point}, passing {passing}")

    for module in ("publisher", "checkpoint"):
        monkeypatch.setattr(f"headrace.trainer.{module}.failpoint", failpoint)
    return passed


def real_learner(world):
    return world.learner(tiny_backend(world.config), build_algorithm(GrpoConfig()))


async def started(world):
    """A learner that lived through its start."""
    while True:
        learner = real_learner(world)
        try:
            await learner.start(takeover=True)
        except Killed:
            continue
        return learner


async def run_to_the_end(world) -> tuple[dict[int, set[float]], int]:
    """Losses by step, those of steps that were taken twice included, and how many learners died in a step."""
    losses: dict[int, set[float]] = {}
    learner, deaths = await started(world), 0
    await world.play(2 * STEPS, learner.version)
    while learner.steps < STEPS:
        try:
            report = await learner.step()
        except Killed:
            learner, deaths = await started(world), deaths + 1
            continue
        losses.setdefault(report.step, set()).add(report.loss)
    return losses, deaths


async def trained_on_the_way_to(world, head: int) -> list[str]:
    """The slots that the versions of a lineage trained on, by its manifests, with repetitions."""
    manifests = {manifest.ref.number: manifest for manifest in await world.registry.manifests()}
    slots, version = [], head
    while version is not None:
        manifest = manifests[version]
        slots += [name.rpartition(".")[0] for name, fate in manifest.consumed.items() if fate == "trained"]
        version = manifest.parent
    return slots


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run in which nothing dies."""
    world = World(tmp_path_factory.mktemp("undisturbed"), max_lag=2 * STEPS, steps=STEPS)
    return asyncio.run(run_to_the_end(world))[0]


@pytest.mark.parametrize("checkpoint_every", [1, 5])
@pytest.mark.parametrize(
    ("point", "passing"),
    [
        *((point, passing) for point in ("after_blob", "after_manifest", "after_commit") for passing in (1, 4, 7)),
        ("between_shards", 1),
        ("between_shards", 9),
    ],
)
async def test_a_run_whose_learner_was_killed_learns_what_it_would_have_learnt(
    tmp_path, monkeypatch, undisturbed, checkpoint_every, point, passing
):
    """P5, P6, case Q1: the same loss for the same episodes, no slot trained twice, and every attempt accounted for.

    Passing 1 is at version 0, the last of each in the last step and its checkpoint.
    """
    world = World(
        tmp_path,
        max_lag=2 * STEPS,
        steps=STEPS,
        checkpoint_every=checkpoint_every,
        limits={"max_deliveries": 10},
    )
    passed = kill_at(monkeypatch, point, passing)
    losses, deaths = await run_to_the_end(world)
    assert passed.count(point) > passing
    assert deaths == (passing > 1)
    assert losses == undisturbed
    stats = await world.ledger.stats()
    assert (stats.fates["trained"], stats.fates["in_flight"], stats.holds) == (4 * STEPS, 0, True)
    slots = await trained_on_the_way_to(world, stats.head)
    assert sorted(slots) == sorted(f"{RUN}.t{group}.{sample}" for group in range(2 * STEPS) for sample in (0, 1))
    numbers = [manifest.ref.number for manifest in await world.registry.manifests()]
    assert len(numbers) == len(set(numbers))
    assert world.checkpoints.settled() == stats.head


async def test_a_learner_killed_in_a_step_delivers_its_batch_once_more(tmp_path):
    """P1, P6: nothing had been published of it, so the next learner trains on the same groups."""
    world = World(tmp_path)

    class Dies(FakeBackend):
        def step(self, batch, algorithm):
            raise Killed

    await world.learner().start()
    await world.play(2, version=0)
    first = world.learner(Dies())
    await first.start(takeover=True)
    with pytest.raises(Killed):
        await first.step()
    second = world.learner()
    await second.start(takeover=True)
    assert (await second.step()).groups == 2
    assert (await world.ledger.stats()).fates == {"trained": 4, "in_flight": 0}
