"""A full disk (P23): what nobody needs goes first, the write is made once more, and else the run ends by name."""

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
from episode_kit import World as Played
from learner_kit import RUN, World
from run_kit import only_root, run_inprocess, small_config
from test_publisher import FILES, publish, publisher, settle
from worker_kit import Bench

from headrace.actors.outbox import Outbox
from headrace.platform.errors import DiskFull, LedgerAway, NotFound, RunFailed
from headrace.platform.observability.metrics import MetricsFile
from headrace.platform.observability.names import Metric
from headrace.platform.observability.parts import Part
from headrace.platform.records import RewardKind, RewardRow
from headrace.platform.records.delivery import Outcome, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.registry import blobs
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.hashing import file_hash
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store import files
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.full_disk import named_when_full
from headrace.platform.store.tables import RewardTable
from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import CheckpointState
from headrace.trainer.consumption import NOTHING

BY_NAME = r"the disk of \S+ is full \(\d+ bytes free\): \[Errno 28\] No space left on device"


class Disk:
    """Full for the next `full` writes; what a write has begun is torn."""

    def __init__(self, monkeypatch) -> None:
        self.full = 0
        self.refused = 0
        for module, name in [(blobs, "_write_synced"), (files, "write_all")]:
            monkeypatch.setattr(module, name, self.over(getattr(module, name)))
        monkeypatch.setattr(checkpoint.os, "fsync", self.over(os.fsync))

    def over(self, write):
        def guarded(file, *data):
            if not self.full:
                return write(file, *data)
            self.full -= 1
            self.refused += 1
            if data:
                file.write(data[0][: len(data[0]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return guarded


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("headrace.trainer.publisher._PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("headrace.actors.delivery._ROOM_PAUSES_S", (0.0, 0.0))


@pytest.fixture
def world(tmp_path) -> World:
    """A learner's world whose registry lies on the disk."""
    world = World(tmp_path)
    world.pins = MemoryPins(world.clock)
    world.registry = FileRegistry(str(tmp_path), world.ledger, cache_dir=tmp_path / "c", run=RUN, pins=world.pins)
    return world


async def settled_twice(world: World):
    """A publisher that keeps all: versions 0 to 4, checkpoints of 0 and 3."""
    one = publisher(world, keep_versions=9, keep_checkpoints=9)
    await one.take_over("learner", True)
    for version in range(5):
        await publish(one, batches=min(version, 1))
        if version in (0, 3):
            await settle(one)
    return one


async def weights(world: World) -> list[int]:
    """The versions whose files are there."""
    found = []
    for manifest in await world.registry.manifests():
        try:
            await world.registry.open(manifest.ref.number)
        except NotFound:
            continue
        found.append(manifest.ref.number)
    return found


class TestTheLearner:
    async def test_versions_that_nobody_needs_make_room(self, disk, world):
        one = await settled_twice(world)
        one.kept = frozenset({2})
        await world.registry.pin(1, "a replica", 60.0)
        disk.full = 1
        assert await publish(one) == 5
        assert await weights(world) == [1, 2, 3, 4, 5], "pinned, kept, settled, the old head and the new one"
        assert world.checkpoints.complete() == [3]
        assert (await world.ledger.stats()).head == 5

    async def test_a_server_on_the_same_disk_is_waited_for(self, disk, world):
        """It refuses to retire versions until it could write to its own file again."""
        one = await settled_twice(world)
        retire, refusals = world.pins.retire, [LedgerAway("MISCONF Errors writing to the AOF file")]

        async def refused_once(version):
            if refusals:
                raise refusals.pop()
            return await retire(version)

        world.pins.retire = refused_once
        disk.full = 1
        await publish(one)
        assert await weights(world) == [3, 4, 5]

    async def test_a_manifest_that_was_torn_is_written_whole(self, disk, world):
        """P8: it is created exclusively, so what is torn must go first."""
        one = await settled_twice(world)
        number = await one.reserve()
        staged = await world.registry.stage(number, one.fence, FILES)

        async def stage(*_):
            disk.full = 1
            return staged

        world.registry.stage = stage
        await one.publish(number, FILES, batches=1, consumed=NOTHING)
        assert disk.refused == 1
        assert (await world.registry.latest()).ref.number == (await world.ledger.stats()).head == number

    async def test_old_checkpoints_make_room_for_a_new_one(self, disk, world):
        one = await settled_twice(world)
        disk.full = 1
        await settle(one)
        assert world.checkpoints.complete() == [3, 4]
        assert world.checkpoints.latest_complete()[1] == {"state": b"all"}

    async def test_a_checkpoint_off_the_lineage_never_replaces_ours(self, disk, world):
        """P6: a learner that was fenced off may have finished one above ours, which the next one goes back to."""
        one = await settled_twice(world)
        stray = CheckpointState(version=77, content_hash="h", batches=9, steps=9, dispatch_sequence=0)
        world.checkpoints.write(stray, {"state": b"other"})
        disk.full = 1
        await publish(one)
        assert world.checkpoints.complete() == [0, 3, 77]

    @pytest.mark.parametrize("write", [publish, settle])
    async def test_full_even_so_ends_the_run_by_name(self, disk, world, write):
        one = await settled_twice(world)
        disk.full = 2
        with pytest.raises(DiskFull, match=BY_NAME) as raised:
            await write(one)
        assert isinstance(raised.value, RunFailed)
        assert str(world.checkpoints._root).rpartition("/")[0] in str(raised.value)
        disk.full = 0
        heir = publisher(world)
        await heir.take_over("heir", True)
        assert (await heir.resume())[0].version == 3, "what is left is enough to go on from"

    @pytest.mark.parametrize(("write", "folder"), [(publish, "versions/f0001-v000005"), (settle, "checkpoints/000004")])
    async def test_what_failed_takes_no_room_while_room_is_made(self, disk, world, tmp_path, write, folder):
        """Else the server, whose own file is on that disk, could not let the pins of old versions go."""
        one = await settled_twice(world)
        retire, seen = world.pins.retire, []

        async def looking(version):
            seen.append(list((tmp_path / folder).glob("*")))
            return await retire(version)

        world.pins.retire = looking
        disk.full = 1
        await write(one)
        assert seen and not any(seen)
        assert list((tmp_path / folder).glob("*"))

    async def test_receipts_are_written_once(self, disk, tmp_path):
        world = World(tmp_path, batch_groups=1)
        table = RewardTable(str(tmp_path), "learner")

        def store(receipts):
            table.append([_reward(each.episode_id) for each in receipts])

        learner = world.learner(on_receipts=store)
        await learner.start()
        await world.play(2, version=0)
        await learner.step()
        disk.full = 1
        await learner.step()
        assert disk.refused == 1
        written = [row.episode_id for row in table.rows()]
        assert len(written) == len(set(written)) == 4
        assert table.torn_lines == 0


class TestTheRest:
    def test_an_append_that_failed_leaves_the_file_as_it_was(self, disk, tmp_path):
        table = RewardTable(str(tmp_path), "w")
        table.append([_reward("a")])
        before = (tmp_path / "rewards" / "w.jsonl").read_bytes()
        disk.full = 1
        with pytest.raises(DiskFull, match=BY_NAME):
            table.append([_reward("b"), _reward("c")])
        assert (tmp_path / "rewards" / "w.jsonl").read_bytes() == before

    async def test_an_episode_waits_until_somebody_has_made_room(self, disk, tmp_path, monkeypatch):
        bench = Bench(tmp_path, monkeypatch, lambda n: Played())
        await bench.publish()
        disk.full = 2
        await bench.worker.play_round(1)
        assert disk.refused == 2
        assert (await bench.ledger.stats()).groups_ready == 1
        assert len(list(bench.store.iterate())) == len(bench.rewards.by_episode()) == 4
        await bench.worker.stop()
        await bench.worker.close()

    async def test_an_episode_that_cannot_be_stored_ends_the_run_by_name(self, tmp_path, monkeypatch):
        """The worker's counters raise what ended its delivery, and whoever asks for them ends the run."""
        bench = Bench(tmp_path, monkeypatch, lambda n: Played())
        await bench.publish()
        Disk(monkeypatch).full = 1000
        await bench.worker.start()
        with pytest.raises(DiskFull, match=BY_NAME):
            await bench.until(lambda stats: stats.groups_ready)
        with pytest.raises(DiskFull):
            await bench.worker.stop()
        await bench.worker.close()
        assert list(bench.store.iterate()) == []

    def test_an_outbox_that_cannot_be_written_keeps_nothing(self, tmp_path, monkeypatch):
        outbox = Outbox(tmp_path / "outbox", RUN)
        put = Submission(attempt_id=AttemptId(RUN, 0, 0), outcome=Outcome.CANCELLED, reason="lag")

        def full(*_):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr("headrace.actors.outbox.write_all", full)
        with pytest.raises(DiskFull, match=r"outbox is full .*: \[Errno 122\]"):
            outbox.add([put])
        assert len(outbox) == len(Outbox(tmp_path / "outbox", RUN)) == 0

    def test_copies_on_a_node_make_way_for_one_another(self, tmp_path, monkeypatch):
        store, cache = BlobStore(f"memory://{tmp_path.name}"), tmp_path / "cache"
        hashes = {name: file_hash(data) for name, data in FILES.items()}
        for path in ("versions/a", "versions/b"):
            store.write_folder(path, FILES)
        old = Path(store.copy_verified("versions/a", hashes, cache))
        write, room = Path.write_bytes, []

        def only_without_the_old_one(path, data):
            if old.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            room.append(path.name)
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", only_without_the_old_one)
        new = Path(store.copy_verified("versions/b", hashes, cache))
        assert {path.name: path.read_bytes() for path in new.iterdir()} == FILES
        assert [path.name for path in (cache / "versions").iterdir()] == ["b"], "not even a part of another try"

    def test_metrics_and_status_fail_open(self, disk, tmp_path, monkeypatch, caplog):
        metrics, part = MetricsFile(str(tmp_path / "metrics.jsonl"), lambda: 0.0), Part(str(tmp_path), "learner")
        disk.full = 1
        metrics.append({Metric.LOSS: 1.0})
        metrics.append({Metric.LOSS: 2.0})
        assert metrics.write_errors == 1
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.0
        monkeypatch.setattr(Path, "replace", _no_room)
        part.start()
        part.close()
        assert "the status of learner could not be written: the disk of" in caplog.text


def test_a_run_ends_by_name_when_not_even_its_summary_can_be_written(lookup_model, tmp_path, monkeypatch):
    write = EpisodeStore.write

    def full_from_version_1_on(store, episodes, worker):
        if any(episode.version.number == 1 for episode, _ in episodes):
            for name in ("replace", "open"):
                monkeypatch.setattr(Path, name, _no_room)
        return write(store, episodes, worker)

    monkeypatch.setattr(EpisodeStore, "write", full_from_version_1_on)
    with pytest.raises(DiskFull, match=r"/episodes/version=000001 is full"):
        run_inprocess(small_config(lookup_model, tmp_path, "log_samples=null"))
    monkeypatch.undo()
    assert not (Path(only_root(tmp_path).url) / "summary.json").exists()


class TestTheName:
    def test_the_system_says_so_itself(self, tmp_path):
        """/dev/full is a file that every system has and that is always full."""
        (tmp_path / "versions").mkdir()
        (tmp_path / "versions" / "model.safetensors").symlink_to("/dev/full")
        with pytest.raises(DiskFull, match=BY_NAME):
            BlobStore(str(tmp_path)).write_folder("versions", FILES)
        with pytest.raises(DiskFull, match=BY_NAME), named_when_full(tmp_path), Path("/dev/full").open("wb") as file:
            file.write(b"x")

    def test_a_quota_is_a_full_disk_and_other_errors_stay_what_they_are(self, tmp_path):
        with pytest.raises(DiskFull, match="quota"), named_when_full(tmp_path / "run"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        with pytest.raises(PermissionError), named_when_full(tmp_path):
            raise PermissionError(errno.EACCES, "no")
        with (
            pytest.raises(DiskFull, match=r"nowhere is full .its free space cannot be told."),
            named_when_full("nowhere"),
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def test_it_travels_between_processes(self):
        error = DiskFull("the disk of /r is full (0 bytes free)")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (DiskFull, str(error))


def _no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reward(episode_id: str) -> RewardRow:
    return RewardRow(episode_id=episode_id, kind=RewardKind.OUTCOME, value=1.0, valid=True)
