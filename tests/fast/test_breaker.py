"""A run whose world fails more than it plays stops in bounded time and says why (case E8)."""

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest
from command_line import call_main
from run_kit import only_root, overrides

from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.deploy.breaker import FEWEST_ENDED, LATELY, Breaker
from headrace.platform.errors import EnvironmentFault
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits, LedgerStats

EMPTY = MemoryLedger("run", LedgerLimits(batch_groups=1, max_lag=0), time.time)


def counts(**fates: int) -> LedgerStats:
    named = {name.replace("__", ":"): n for name, n in fates.items()}
    nothing = asyncio.run(EMPTY.stats())
    delivered = sum(n for fate, n in named.items() if fate.split(":")[0] in ("trained", "dropped"))
    return msgspec.structs.replace(nothing, dispatched=sum(named.values()), fates=named, score_count=delivered)


def test_a_few_failures_say_nothing():
    assert Breaker(0.5).cause(counts(failed__environment=FEWEST_ENDED - 1, in_flight=500), []) is None


def test_running_attempts_count_for_neither_side():
    assert Breaker(0.5).cause(counts(failed__environment=FEWEST_ENDED, in_flight=10_000), []) is not None


def test_what_was_delivered_counts_though_it_is_not_trained_yet():
    stats = msgspec.structs.replace(counts(failed__environment=FEWEST_ENDED, in_flight=500), score_count=300)
    assert Breaker(0.5).cause(stats, []) is None


def test_the_limit_itself_is_allowed():
    breaker = Breaker(0.25)
    assert breaker.cause(counts(trained=75, failed__environment=25), []) is None
    assert breaker.cause(counts(trained=75, failed__environment=26), []) is not None


def test_the_message_names_share_owners_and_the_last_fault():
    said = Breaker(0.5).cause(
        counts(trained=10, dropped__lag=10, failed__environment=30, failed__infrastructure=10), ["old", "disk full"]
    )
    assert said is not None
    assert "40 of the last 60" in said
    assert "'environment': 30" in said and "'infrastructure': 10" in said
    assert "50%" in said
    assert "disk full" in said and "old" not in said


def at_head(head: int, stats: LedgerStats) -> LedgerStats:
    return msgspec.structs.replace(stats, head=head)


def test_what_died_with_a_part_is_that_parts_business():  # case E9
    breaker = Breaker(0.5)
    assert breaker.cause(at_head(7, counts(trained=40)), []) is None
    for lost in (300, 600):
        assert breaker.cause(at_head(7, counts(trained=40, failed__infrastructure=lost)), [], restarts=1) is None
    assert breaker.cause(at_head(8, counts(trained=40, failed__infrastructure=700)), [], restarts=1) is None
    worse = at_head(8, counts(trained=40, failed__infrastructure=700 + FEWEST_ENDED))
    assert breaker.cause(worse, [], restarts=1) is not None, "it goes on failing"


def test_a_ledger_that_was_rebuilt_begins_anew():
    breaker = Breaker(0.5)
    assert breaker.cause(counts(trained=400), []) is None
    rebuilt = msgspec.structs.replace(counts(trained=20, failed__infrastructure=300), epoch=1)
    assert breaker.cause(rebuilt, []) is None


def test_a_world_that_breaks_late_is_not_excused_by_its_past():
    breaker = Breaker(0.5)
    for step in range(100):
        assert breaker.cause(counts(trained=1000 * step), []) is None
    broken = [breaker.cause(counts(trained=99_000, failed__environment=n), ["down"]) for n in range(0, LATELY + 1, 16)]
    assert broken[-1] is not None and "down" in broken[-1]


def test_a_world_that_recovered_goes_on():
    breaker = Breaker(0.5)
    assert breaker.cause(counts(trained=20, failed__environment=15), []) is None
    for good in range(20, 2000, 50):
        assert breaker.cause(counts(trained=good, failed__environment=15), []) is None


def test_counts_that_go_back_after_a_rollback_are_survived():
    breaker = Breaker(0.5)
    assert breaker.cause(counts(trained=1000), []) is None
    assert breaker.cause(counts(trained=600, in_flight=400), []) is None
    assert breaker.cause(counts(trained=600, failed__environment=900), ["gone"]) is not None


class BrokenLookup(LookupEnvironment):
    """Fails in the splits named, from the given number of resets on."""

    name = "broken"

    def __init__(self, splits: set[str], fault: Exception, after: list[int]) -> None:
        super().__init__()
        self._splits, self._fault, self._left = splits, fault, after

    async def _reset(self, task, seed):
        if task.split in self._splits:
            self._left[0] -= 1
            if self._left[0] < 0:
                raise self._fault
        return await super()._reset(task, seed)


@pytest.fixture
def break_world(monkeypatch):
    def register(splits: set[str], fault: Exception, after: int = 0) -> None:
        lookup, left = ENVIRONMENTS["lookup"], [after]
        kind = EnvironmentKind(environment=lambda args: BrokenLookup(splits, fault, left), tasks=lookup.tasks)
        monkeypatch.setitem(ENVIRONMENTS, "broken", kind)

    return register


FAULTS = {
    "bug": RuntimeError("the store is on fire"),
    "transient": EnvironmentFault("the store is on fire"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("splits", [{"train"}, {"train", "dev"}], ids=["training", "evaluation too"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_world_that_always_fails_ends_the_run(
    fault, splits, break_world, lookup_model, tmp_path, monkeypatch, capsys
):  # case E8
    break_world(splits, FAULTS[fault])
    began = time.monotonic()
    code = call_main(
        monkeypatch, "train", "lookup", *overrides(lookup_model, tmp_path, "environments.0.name=broken"), "--json"
    )
    assert time.monotonic() - began < 30
    assert code == 1
    said = capsys.readouterr().err
    assert "the store is on fire" in said and "Traceback" not in said
    left = json.loads(Path(only_root(tmp_path).summary).read_text())
    assert "the store is on fire" in left["failed"]


@pytest.mark.timeout(60)
def test_a_world_that_breaks_in_the_middle_ends_the_run(break_world, lookup_model, tmp_path, monkeypatch, capsys):
    break_world({"train"}, RuntimeError("the store is on fire"), after=2000)
    changes = overrides(lookup_model, tmp_path, "environments.0.name=broken", "learner.steps=500")
    assert call_main(monkeypatch, "train", "lookup", *changes) == 1
    assert "the store is on fire" in capsys.readouterr().err
    left = json.loads(Path(only_root(tmp_path).summary).read_text())
    assert "the store is on fire" in left["failed"]
    assert left["learner_steps"] > 0
    assert left["equation_holds"] and left["fates"]["in_flight"] == 0 and left["fates"]["trained"] > 0
