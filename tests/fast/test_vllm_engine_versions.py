"""Who runs under which version, and who waits: the bookkeeping without vLLM."""

import asyncio

import numpy as np
import pytest

from headrace.platform.errors import EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import GenerationRequest
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.serving.vllm_versions import Held, Ticket, Versions

STICKY, TURN, INFLIGHT = UpdateMode.STICKY, UpdateMode.TURN, UpdateMode.INFLIGHT


def manifest(number: int) -> VersionManifest:
    return VersionManifest(
        ref=VersionRef("tiny", number),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash=f"hash-{number}",
        batches=0,
        path="",
    )


def held(number: int) -> Held:
    return Held(manifest=manifest(number), path="")


def ticket(version: int, mode: UpdateMode = STICKY, session: str = "s") -> Ticket:
    request = GenerationRequest(
        key=session,
        session=session,
        token_ids=np.array([1], np.int32),
        version=version,
        seed=0,
        update_mode=mode,
    )
    return Ticket(request=request, future=asyncio.get_running_loop().create_future())


def versions(*numbers: int) -> Versions:
    made = Versions("r0", session_ttl_s=10.0)
    for number in numbers:
        made.add(held(number))
    return made


@pytest.mark.parametrize(
    ("mode", "asked", "served"),
    [(STICKY, 3, 3), (TURN, 3, 5), (INFLIGHT, 3, 5), (TURN, 5, 5), (TURN, 4, 5), (INFLIGHT, 0, 5)],
)
async def test_sticky_gets_its_own_and_others_the_newest(mode, asked, served):
    # P22
    entered = await versions(3, 5).enter(ticket(asked, mode), 0.0)
    assert entered.ref.number == served


@pytest.mark.parametrize(("mode", "asked"), [(STICKY, 4), (STICKY, 6), (TURN, 6), (INFLIGHT, 6)])
async def test_versions_never_go_back(mode, asked):
    # P22
    with pytest.raises(VersionUnavailable, match=r"\[3, 5\]"):
        await versions(3, 5).enter(ticket(asked, mode), 0.0)


async def test_what_a_coming_version_will_do_for_is_held_back():
    table = versions(3)
    with table.coming(4):
        waiting = asyncio.ensure_future(table.enter(ticket(4, TURN), 0.0))
        await asyncio.sleep(0)
        for too_new in (ticket(5, INFLIGHT), ticket(4, STICKY)):
            with pytest.raises(VersionUnavailable):
                await table.enter(too_new, 0.0)
        assert not waiting.done()
        table.replace(table.oldest(), held(4))
    assert (await waiting).ref.number == 4


async def test_a_failed_load_lets_them_go_on_under_the_old_one():
    # case S4
    table = versions(3)
    with table.coming(4):
        with pytest.raises(OSError), table.giving_up(table.oldest()):
            waiting = asyncio.ensure_future(table.enter(ticket(3, TURN), 0.0))
            with pytest.raises(VersionUnavailable):
                await table.enter(ticket(3), 0.0)
            assert not waiting.done() and table.numbers() == []
            raise OSError
        assert (await waiting).ref.number == 3
    assert table.numbers() == [3]
    with pytest.raises(VersionUnavailable):
        await table.enter(ticket(4, TURN), 0.0)


async def test_giving_up_waits_for_all_but_inflight():
    # P22, case S1
    table = versions(3)
    old = table.oldest()
    runs = [ticket(3, mode, session=mode) for mode in UpdateMode]
    for each in runs:
        await table.enter(each, 0.0)
    alone = asyncio.ensure_future(table.until_only_inflight(old))
    empty = asyncio.ensure_future(table.until_empty(old))
    for each in runs:
        assert alone.done() == (each.request.update_mode is INFLIGHT)
        table.leave(each)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(alone, empty)


async def test_inflight_requests_and_their_sessions_move():
    table = versions(3, 4)
    moving, staying = ticket(3, INFLIGHT, "moving"), ticket(4, STICKY, "staying")
    table.drop(table.get(4))
    await table.enter(moving, 0.0)
    table.add(held(4))
    await table.enter(staying, 0.0)
    assert table.movable(to=4) == [moving]
    table.replace(table.get(3), held(5))
    assert table.movable(to=5) == []
    assert table.get(5).running == {moving}
    assert [table.sessions(number, 1.0) for number in (3, 4, 5)] == [0, 1, 1]


async def test_sessions_are_released_or_forgotten():
    # P19
    table = versions(3)
    for index, session in enumerate("abc"):
        await table.enter(ticket(3, session=session), float(index))
    assert table.sessions(3, 5.0) == 3
    table.release("b")
    table.release("never seen")
    assert table.sessions(3, 5.0) == 2
    assert table.sessions(3, 11.0) == 1


async def test_a_held_version_is_known_by_its_content():
    table = versions(3)
    assert table.holds(manifest(3)) and not table.holds(manifest(4))
    other = VersionManifest(
        ref=VersionRef("tiny", 3),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash="other",
        batches=0,
        path="",
    )
    with pytest.raises(EngineError):
        table.holds(other)
    with table.giving_up(table.oldest()), pytest.raises(EngineError):
        table.holds(manifest(3))


async def test_death_wakes_everybody():
    # case S5
    table = versions(3)
    runs = ticket(3)
    await table.enter(runs, 0.0)
    waiting = [asyncio.ensure_future(table.until_empty(table.oldest()))]
    with table.coming(4):
        waiting.append(asyncio.ensure_future(table.enter(ticket(4, TURN), 0.0)))
        await asyncio.sleep(0)
        table.fail("the core is gone")
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 2
    with pytest.raises(EngineDead, match="the core is gone"):
        await table.enter(ticket(3), 0.0)
