"""Group commit: who waits is told when it is on disk, many share one sync, and a failed one is the end."""

import asyncio
import errno
import os
import threading

import pytest

from headrace.actors.gateway import group_writer
from headrace.actors.gateway.group_writer import GroupWriter

LONG_S = 60.0
SOON_S = 0.01


class Disk:
    """Syncs when it is let, counts, and fails when it is told to."""

    def __init__(self) -> None:
        self.syncs = 0
        self.begun, self.done, self.let = threading.Event(), threading.Event(), threading.Event()
        self.failure: OSError | None = None
        self.let.set()

    def __call__(self, file: int) -> None:
        self.begun.set()
        assert self.let.wait(LONG_S)
        if self.failure is not None:
            raise self.failure
        os.fdatasync(file)
        self.syncs += 1
        self.done.set()


@pytest.fixture
def disk():
    return Disk()


def full() -> OSError:
    return OSError(errno.ENOSPC, "no space left")


class TestWaiting:
    async def test_is_over_when_it_is_on_disk_and_not_before(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        disk.let.clear()
        waiting = writer.durable(writer.append(b"a", "mark"))
        await asyncio.to_thread(disk.begun.wait, LONG_S)
        assert not waiting.done() and writer.synced == (0, "")
        disk.let.set()
        await waiting
        assert writer.synced == (1, "mark") and (tmp_path / "f").read_bytes() == b"a"
        writer.close()

    async def test_many_share_a_sync(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        disk.let.clear()
        first = writer.durable(writer.append(b"0"))
        await asyncio.to_thread(disk.begun.wait, LONG_S)
        others = [writer.durable(writer.append(b"%d" % number)) for number in range(1, 10)]
        disk.let.set()
        await asyncio.gather(first, *others)
        assert disk.syncs == 2
        assert (tmp_path / "f").read_bytes() == b"0123456789"  # in the order of the calls
        writer.close()

    async def test_what_is_on_disk_already_needs_none(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        await writer.durable(writer.append(b"a"))
        assert writer.durable(1).done() and disk.syncs == 1
        writer.close()

    async def test_whoever_stops_waiting_does_not_disturb_the_others(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        disk.let.clear()
        gone, stays = writer.durable(writer.append(b"a")), writer.durable(writer.append(b"b"))
        gone.cancel()
        disk.let.set()
        await stays
        assert gone.cancelled() and writer.synced[0] == 2
        writer.close()

    def test_a_closed_loop_does_not_end_the_thread(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        disk.let.clear()

        async def ask() -> None:
            writer.durable(writer.append(b"a"))

        asyncio.run(ask())
        disk.let.set()

        async def ask_again() -> None:
            await writer.durable(writer.append(b"b"))

        asyncio.run(ask_again())
        assert (tmp_path / "f").read_bytes() == b"ab"
        writer.close()


class TestWithoutWaiting:
    def test_it_is_on_disk_within_the_flush_time(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", SOON_S, sync=disk)
        writer.append(b"a")
        assert disk.done.wait(LONG_S)
        assert (tmp_path / "f").read_bytes() == b"a"
        writer.close()

    def test_close_brings_everything_to_disk_and_ends_it(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        writer.append(b"a")
        writer.close()
        writer.close()
        assert disk.syncs == 1 and (tmp_path / "f").read_bytes() == b"a"
        with pytest.raises(OSError, match="closed"):
            writer.append(b"b")

    def test_a_disk_that_does_not_keep_up_refuses_more(self, tmp_path, disk, monkeypatch):
        monkeypatch.setattr(group_writer, "MAX_PENDING_BYTES", 8)
        writer = GroupWriter(tmp_path / "f", SOON_S, sync=disk)
        disk.let.clear()
        writer.append(b"123456789")
        with pytest.raises(BlockingIOError, match="keep up"):
            writer.append(b"a")
        disk.let.set()
        writer.close()
        assert (tmp_path / "f").read_bytes() == b"123456789"

    def test_never_writes_into_a_file_that_is_there(self, tmp_path):
        (tmp_path / "f").write_bytes(b"old")
        with pytest.raises(FileExistsError):
            GroupWriter(tmp_path / "f", LONG_S)


class TestAFailure:
    async def test_is_told_to_all_who_wait_and_to_all_later(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        disk.let.clear()
        first = writer.durable(writer.append(b"a"))
        await asyncio.to_thread(disk.begun.wait, LONG_S)
        second = writer.durable(writer.append(b"b"))
        disk.failure = full()
        disk.let.set()
        for waiting in (first, second):
            with pytest.raises(OSError, match="no space left") as raised:
                await waiting
            assert raised.value.errno == errno.ENOSPC
        disk.failure = None  # room again, but what reached the disk is not known
        with pytest.raises(OSError, match="no space left"):
            writer.append(b"c")
        with pytest.raises(OSError, match="no space left"):
            await writer.durable(2)
        assert writer.synced == (0, "") and writer.failure is not None
        with pytest.raises(OSError, match="no space left"):
            writer.close()

    async def test_leaves_what_was_on_disk_before(self, tmp_path, disk):
        writer = GroupWriter(tmp_path / "f", LONG_S, sync=disk)
        await writer.durable(writer.append(b"a", "first"))
        disk.failure = full()
        with pytest.raises(OSError, match="no space left"):
            await writer.durable(writer.append(b"b"))
        assert writer.synced == (1, "first") and writer.durable(1).done()
        with pytest.raises(OSError, match="no space left"):
            writer.close()
