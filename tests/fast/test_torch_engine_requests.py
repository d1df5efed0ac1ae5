"""Requests of the torch engine: reuse, batch mates, limits, cancellation, deadlines, death."""

import asyncio
import itertools

import numpy as np
import pytest
from torch_engine_kit import POSITIONS, VOCABULARY, make_engine, manifest, play, play_many, request, save_model

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.status import FinishReason


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(params=[True, False], ids=["inline", "threaded"])
async def engine(folder, request):
    engine = make_engine(inline=request.param)
    await engine.load(manifest(0), folder)
    yield engine
    await engine.close()


async def test_batch_mates_do_not_matter(engine):
    alone = await play(engine, "alone", 4)
    await engine.release("alone")
    crowd = await play_many(engine, 16)
    assert crowd[4].ids == alone.ids


async def test_another_seed_gives_other_tokens(engine):
    drawn = [await engine.generate(request(f"s{seed}", [1, 2, 3], seed=seed, max_new_tokens=20)) for seed in (-1, 0, 1)]
    assert len({tuple(generation.token_ids.tolist()) for generation in drawn}) == 3


async def test_only_new_tokens_are_prefilled(engine):
    first = await engine.generate(request("s", [1, 2, 3, 4], max_new_tokens=3))
    assert (engine.stats().prefilled_tokens, engine.stats().reused_tokens) == (4, 0)
    context = [1, 2, 3, 4, *first.token_ids.tolist(), 9, 8]
    await engine.generate(request("s", context, max_new_tokens=1))
    # The last sampled token never went through the model: it is prefilled with the two new ones.
    assert (engine.stats().prefilled_tokens, engine.stats().reused_tokens) == (4 + 3, 6)
    assert engine.stats().sampled_tokens == 4


async def test_a_changed_context_keeps_the_common_prefix(engine):
    await engine.generate(request("s", [1, 2, 3, 4, 5, 6], max_new_tokens=1))
    again = await engine.generate(request("s", [1, 2, 3, 40, 50], seed=3))
    assert engine.stats().reused_tokens == 3
    fresh = await engine.generate(request("other", [1, 2, 3, 40, 50], seed=3))
    assert again.token_ids.tolist() == fresh.token_ids.tolist()


async def test_the_same_context_again_computes_its_last_token(engine):
    first = await engine.generate(request("s", [1, 2, 3]))
    again = await engine.generate(request("s", [1, 2, 3]))
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert engine.stats().reused_tokens == 2


async def test_a_released_session_reuses_nothing(engine):
    await engine.generate(request("s", [1, 2, 3]))
    await engine.release("s")
    await engine.generate(request("s", [1, 2, 3]))
    assert engine.stats().reused_tokens == 0


async def test_two_requests_of_one_session_run_one_after_the_other(engine):
    calls = [engine.generate(request("s", [1, 2, 3])) for _ in range(3)]
    first, *others = [g.token_ids.tolist() for g in await asyncio.gather(*calls, engine.generate(request("t", [4])))]
    assert others[:2] == [first, first]


@pytest.mark.parametrize("inline", [True, False])
async def test_five_hundred_at_once(folder, inline):  # case S11
    engine = make_engine(inline=inline, max_sessions=64, max_batch=32)
    await engine.load(manifest(0), folder)
    generations = await asyncio.gather(*(engine.generate(request(f"s{i}", [i % 60, 1])) for i in range(500)))
    assert [len(g.token_ids) for g in generations] == [6] * 500
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    await engine.close()


async def test_cancelled_requests_give_their_slots_back(folder):
    engine = make_engine(inline=False, max_sessions=2, max_batch=2)
    await engine.load(manifest(0), folder)
    limits = [60, 2, 60, 60]
    calls = [
        asyncio.ensure_future(engine.generate(request(f"s{i}", [i], max_new_tokens=limit)))
        for i, limit in enumerate(limits)
    ]
    await calls.pop(1)  # now the first request is running, the third has joined it or is about to, the last waits
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    served = await asyncio.gather(*(engine.generate(request(f"t{i}", [i])) for i in range(2)))
    assert [len(g.token_ids) for g in served] == [6, 6]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    await engine.close()


async def test_a_cancelled_session_goes_on_correctly(engine):
    call = asyncio.ensure_future(engine.generate(request("s", [1, 2, 3], max_new_tokens=50)))
    await engine.generate(request("mate", [1], max_new_tokens=3))
    assert not call.done()
    call.cancel()
    await asyncio.wait([call])
    again = await engine.generate(request("s", [1, 2, 3]))
    fresh = await engine.generate(request("t", [1, 2, 3]))
    assert again.token_ids.tolist() == fresh.token_ids.tolist()


async def test_deadlines_hold_while_waiting_and_while_running(folder):
    engine = make_engine(inline=True, max_sessions=1, max_batch=1)
    await engine.load(manifest(0), folder)
    ahead = asyncio.ensure_future(engine.generate(request("a", [1], max_new_tokens=60, deadline_s=0.0)))
    behind = asyncio.ensure_future(engine.generate(request("b", [1], max_new_tokens=60, deadline_s=0.0)))
    results = await asyncio.gather(ahead, behind, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineExceeded, DeadlineExceeded]
    assert len((await engine.generate(request("c", [1]))).token_ids) == 6
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    await engine.close()


async def test_the_last_position_ends_a_request(engine):
    generation = await engine.generate(request("s", [1] * (POSITIONS - 3), max_new_tokens=50))
    assert (len(generation.token_ids), generation.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize("length", [POSITIONS, POSITIONS + 5])
async def test_a_full_context_gets_no_token(engine, length):
    generation = await engine.generate(request("s", [1] * length))
    assert (len(generation.token_ids), generation.finish_reason) == (0, FinishReason.LENGTH)
    assert generation.version_spans == ()


async def test_stop_ids_of_each_request_are_its_own(engine):
    plain = await engine.generate(request("a", [1, 2], max_new_tokens=8))
    second, fourth = int(plain.token_ids[1]), int(plain.token_ids[3])
    stops = [(), (second,), (VOCABULARY + 7, second, fourth)]
    generations = await asyncio.gather(
        *(engine.generate(request(f"b{i}", [1, 2], max_new_tokens=8, stop_token_ids=s)) for i, s in enumerate(stops))
    )
    ids = plain.token_ids.tolist()
    cut = ids[: ids.index(second) + 1]
    assert [g.token_ids.tolist() for g in generations][:2] == [ids, cut]
    assert generations[1].finish_reason is FinishReason.STOP
    assert len(generations[2].token_ids) <= len(cut)


async def test_greedy_beside_sampled(engine):
    greedy, sampled = await asyncio.gather(
        engine.generate(request("a", [1, 2], temperature=0.0)), engine.generate(request("b", [1, 2]))
    )
    assert greedy.logprobs.tolist() == [0.0] * 6
    assert sampled.logprobs.max() < 0


@pytest.mark.parametrize(("ids", "limit"), [([], 4), ([1], 0), ([-1], 4), ([VOCABULARY], 4)])
async def test_requests_without_meaning_are_refused(engine, ids, limit):
    with pytest.raises(EngineError):
        await engine.generate(request("s", ids, max_new_tokens=limit))


async def test_inline_runs_repeat_to_the_last_digit(folder):
    runs = []
    for _ in range(2):
        engine = make_engine()
        await engine.load(manifest(0), folder)
        played = await play_many(engine, 20, temperature=0.9)
        runs.append([(p.ids, [g.logprobs.tobytes() for _, g in p.turns]) for p in played])
        await engine.close()
    assert runs[0] == runs[1]


async def test_a_failing_step_kills_the_engine(engine, monkeypatch):
    def explode(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(engine._runner, "logits", explode)
    calls = [engine.generate(request(f"s{i}", [1])) for i in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 3
    assert "no room" in str(results[0])
    with pytest.raises(EngineDead):
        await engine.generate(request("late", [1]))
    assert list(engine.versions()) == []


async def test_a_version_retires_when_its_last_request_is_done(engine, folder):
    await engine.load(manifest(1), folder)
    running = asyncio.ensure_future(engine.generate(request("s", [1], max_new_tokens=60)))
    await asyncio.sleep(0)
    retiring = asyncio.ensure_future(engine.retire(0))
    await asyncio.sleep(0)
    assert list(engine.versions()) == [1]
    with pytest.raises(VersionUnavailable):
        await engine.generate(request("new", [1]))
    assert len((await running).token_ids) == 60
    await retiring
    with pytest.raises(VersionUnavailable):
        await engine.generate(request("s", [1]))
    assert len((await engine.generate(request("s", [1], version=1))).token_ids) == 6


async def test_abandoning_the_last_request_lets_a_version_retire(engine):
    running = asyncio.ensure_future(engine.generate(request("s", [1], max_new_tokens=60)))
    await asyncio.sleep(0)
    retiring = asyncio.ensure_future(engine.retire(0))
    await asyncio.sleep(0)
    running.cancel()
    await retiring
    assert list(engine.versions()) == []


async def test_sessions_are_counted_until_released(engine, folder):
    await engine.load(manifest(1), folder)
    for session, version in (("a", 0), ("b", 0), ("b", 1), ("c", 1)):
        await engine.generate(request(session, [1], version))
    assert (engine.sessions(0), engine.sessions(1)) == (1, 2)
    await engine.release("c")
    assert (engine.sessions(0), engine.sessions(1)) == (1, 1)


async def test_a_session_not_heard_of_is_gone(folder):
    engine = make_engine(session_ttl_s=0.0)
    await engine.load(manifest(0), folder)
    await engine.generate(request("a", [1]))
    assert engine.sessions(0) == 0
    await engine.close()


async def test_busy_intervals_add_up(engine):
    await play_many(engine, 6)
    intervals = engine.busy_intervals(0.0)
    assert intervals and all(start <= end for start, end in intervals)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))
    assert 0 < engine.busy < sum(end - start for start, end in intervals) + 0.1
    assert engine.busy_intervals(intervals[-1][1]) == []


async def test_spans_and_names(engine):
    generation = await engine.generate(request("s", [1], max_new_tokens=5))
    (span,) = generation.version_spans
    assert (span.version, span.start, span.end) == (manifest(0).ref, 0, 5)
    assert generation.replica == "r0"
    assert generation.token_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32
