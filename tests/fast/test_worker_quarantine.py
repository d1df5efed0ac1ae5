"""A worker plays a broken task no more and tells the others; where every task is broken it says so (P27, case E8)."""

import pytest
from episode_kit import World, ends
from worker_kit import SIZE, Bench

from headrace.actors.news import News
from headrace.actors.quarantine import QuarantinedTask, QuarantineFile
from headrace.platform.errors import RunFailed
from headrace.platform.records import Message, Observation, Role

OUT = News(quarantined=(QuarantinedTask(environment="kit", task_id="train1", reason="its board is missing"),))


class Broken(World):
    """Fails in the tasks named, without a hope; the others are solved."""

    def __init__(self, names):
        super().__init__(lambda message: ends(1.0))
        self._names = names

    async def reset(self, task, seed):
        await super().reset(task, seed)
        if task.task_id in self._names:
            raise KeyError("board")
        return Observation((Message(Role.USER, "go"),))


def played(bench):
    return [world.resets[0][0].task_id for world in bench.used if world.resets]


async def rounds(bench, count):
    for _ in range(count):
        await bench.worker.play_round(2)
        while groups := await bench.ledger.lease(bench.fence, 0, 0, 2):
            await bench.ledger.drop(bench.fence, [group.group for group in groups], "fidelity")


async def test_a_broken_task_is_played_until_it_is_out_and_then_others_in_its_place(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, lambda n: Broken({"train1"}))
    await bench.publish()
    await rounds(bench, 30)
    names = played(bench)
    assert names.count("train1") == SIZE, "one group meets it, and no other"
    assert len(names) >= 30 * SIZE, "groups are filled with other tasks"
    (row,) = bench.worker.stats().quarantined
    assert row.task_id == "train1"
    assert "board" in row.reason
    assert bench.worker.stats().quarantined == (row,), "it is told again: an answer may be lost"


async def test_what_another_worker_found_is_not_played_here(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, lambda n: Broken(set()))
    await bench.publish()
    bench.worker.tell(OUT)
    await rounds(bench, 30)
    assert "train1" not in played(bench)
    assert len(played(bench)) == 30 * 2 * SIZE


async def test_evaluations_play_every_task(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, lambda n: Broken(set()))
    await bench.publish()
    bench.worker.tell(News(quarantined=(QuarantinedTask(environment="kit", task_id="dev4", reason="none"),)))
    await bench.worker.evaluate(0, "dev", range(4), 0)
    assert "dev4" in played(bench)


async def test_where_every_task_is_broken_the_run_ends_by_name(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, lambda n: Broken({f"train{n}" for n in range(50)}))
    await bench.publish()
    with pytest.raises(RunFailed, match="every task of kit that was looked at is quarantined"):
        await rounds(bench, 200)


async def test_what_is_out_stays_out_after_a_resume(tmp_path):
    QuarantineFile(str(tmp_path)).append(OUT.quarantined)
    assert tuple(QuarantineFile(str(tmp_path)).read({})) == OUT.quarantined


def test_news_add_up():
    assert OUT + News() == OUT
    assert OUT
    assert not News()
    assert len((OUT + OUT).quarantined) == 2
