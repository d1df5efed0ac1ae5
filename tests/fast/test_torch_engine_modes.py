"""Update modes of the torch engine: who moves to new weights, when, and what is computed anew (P22)."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from torch_engine_kit import POSITIONS, VOCABULARY, make_engine, manifest, request, save_model
from transformers import AutoModelForCausalLM

from headrace.platform.errors import EngineError, VersionUnavailable
from headrace.platform.records.status import UpdateMode

STICKY, TURN, INFLIGHT = UpdateMode.STICKY, UpdateMode.TURN, UpdateMode.INFLIGHT


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]


@pytest.fixture
async def engine(folders):
    engine = make_engine()
    await engine.load(manifest(0), folders[0])
    yield engine
    await engine.close()


def ask(session, ids, mode, version=0, **sampling):
    return msgspec.structs.replace(request(session, ids, version, **sampling), update_mode=mode)


def start(engine, *asked):
    return [asyncio.ensure_future(engine.generate(each)) for each in asked]


async def steps(engine, count, version=0):
    """Let everything that runs sample `count` tokens more, or one less."""
    await engine.generate(request(f"steps {count}", [7], version, max_new_tokens=count))


def numbers(generation):
    return [span.version.number for span in generation.version_spans]


def assert_spans(models, context, generation, temperature=1.0):
    """Every token has the logprob that its own version's weights give it after all that stands before it."""
    spans = generation.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(generation.token_ids)
    ids = [*context, *generation.token_ids.tolist()]
    for span in spans:
        with torch.no_grad():
            logits = models[span.version.number](torch.tensor([ids])).logits[0].double() / temperature
        rows = torch.arange(span.start, span.end) + len(context)
        wanted = torch.log_softmax(logits, -1)[rows - 1, torch.tensor(ids)[rows]]
        np.testing.assert_allclose(generation.logprobs[span.start : span.end], wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_inflight_rows_cross_two_loads(engine, folders, models, temperature):  # cases S1, S3
    contexts = [[3 + i] * (1 + 5 * i) for i in range(4)]
    running = start(
        engine,
        *(
            ask(f"s{i}", c, INFLIGHT, max_new_tokens=20 + 7 * i, temperature=temperature)
            for i, c in enumerate(contexts)
        ),
    )
    for version in (1, 2):
        await steps(engine, 5, version - 1)
        await engine.load(manifest(version), folders[version])
    generations = await asyncio.gather(*running)
    for i, (context, generation) in enumerate(zip(contexts, generations, strict=True)):
        assert numbers(generation) == [0, 1, 2]
        assert len(generation.token_ids) == 20 + 7 * i
        assert_spans(models, context, generation, temperature)


async def test_a_new_version_leaves_sticky_and_turn_rows_alone(engine, folders, models):  # case S1
    alone = await engine.generate(request("alone", [1, 2], max_new_tokens=30))
    running = start(engine, *(ask(mode, [1, 2], mode, max_new_tokens=30) for mode in (STICKY, TURN, INFLIGHT)))
    await steps(engine, 5)
    await engine.load(manifest(1), folders[1])
    sticky, turn, inflight = await asyncio.gather(*running)
    assert [numbers(each) for each in (sticky, turn, inflight)] == [[0], [0], [0, 1]]
    assert sticky.token_ids.tolist() == turn.token_ids.tolist() == alone.token_ids.tolist()
    cut = inflight.version_spans[0].end
    assert inflight.token_ids[:cut].tolist() == alone.token_ids[:cut].tolist()
    assert_spans(models, [1, 2], inflight)


async def test_the_seed_alone_decides_the_numbers(engine, folders):
    """What is drawn after a change is what the new version would have drawn after these tokens."""
    (running,) = start(engine, ask("s", [1, 2], INFLIGHT, max_new_tokens=30))
    await steps(engine, 8)
    await engine.load(manifest(1), folders[1])
    generation = await running
    cut = generation.version_spans[0].end
    seen = [1, 2, *generation.token_ids[:cut].tolist()]
    again = await engine.generate(request("again", seen, 1, max_new_tokens=30 - cut))
    assert again.token_ids.tolist() == generation.token_ids[cut:].tolist()


async def test_requests_in_line_that_may_start_under_the_new_version(folders):
    engine = make_engine(max_batch=1)
    await engine.load(manifest(0), folders[0])
    first, *others = start(
        engine,
        request("first", [1], max_new_tokens=30),
        *(ask(mode, [1], mode) for mode in (STICKY, TURN, INFLIGHT)),
    )
    await asyncio.sleep(0)
    await engine.load(manifest(1), folders[1])
    assert [numbers(await each) for each in (first, *others)] == [[0], [0], [1], [1]]
    assert (engine.sessions(0), engine.sessions(1)) == (2, 2)
    await engine.close()


async def test_rows_that_move_may_overfill_a_batch_and_nobody_joins_before_it_has_room(folders):
    engine = make_engine(max_batch=2)
    for version in (0, 1):
        await engine.load(manifest(version), folders[version])
    running = start(engine, *(ask(f"s{i}", [1], INFLIGHT, max_new_tokens=40) for i in range(2)))
    await steps(engine, 2)
    retiring = asyncio.ensure_future(engine.retire(1))
    await asyncio.sleep(0)
    running += start(engine, *(ask(f"t{i}", [1], INFLIGHT, max_new_tokens=20) for i in range(3)))
    for _ in range(2):  # into the line, and from there into the batch: the engine steps on this loop
        await asyncio.sleep(0)
    assert engine.stats().running == 4  # two of each version, and one in line
    await engine.load(manifest(2), folders[2])
    await retiring
    assert (engine.stats().running, engine.stats().waiting) == (4, 1)
    generations = await asyncio.gather(*running)
    assert [numbers(each) for each in generations] == [[1, 2], [1, 2], [0, 2], [0, 2], [2]]
    await engine.close()


async def test_all_keys_and_values_are_computed_anew_and_then_reused(engine, folders):  # case S3
    (running,) = start(engine, ask("s", [1, 2, 3], INFLIGHT, max_new_tokens=12))
    await steps(engine, 4)
    before = engine.stats().prefilled_tokens
    await engine.load(manifest(1), folders[1])
    generation = await running
    moved_at = generation.version_spans[0].end
    assert engine.stats().prefilled_tokens - before == 3 + moved_at
    assert engine.stats().reused_tokens == 0
    context = [1, 2, 3, *generation.token_ids.tolist(), 9]
    await engine.generate(ask("s", context, INFLIGHT, max_new_tokens=1))
    assert engine.stats().reused_tokens == 3 + 11  # all but the last sampled token, which no model has seen


async def test_a_session_that_moves_gives_its_old_slot_back(folders):
    engine = make_engine(max_sessions=2)
    await engine.load(manifest(0), folders[0])
    for session, mode in (("stays", STICKY), ("moves", TURN)):
        await engine.generate(ask(session, [1, 2, 3, 4], mode))
    await engine.load(manifest(1), folders[1])
    await engine.generate(ask("moves", [1, 2, 3, 4], TURN))
    assert engine.stats().reused_tokens == 0
    await engine.generate(ask("stays", [1, 2, 3, 4, 5], STICKY))
    assert engine.stats().reused_tokens == 4
    await engine.close()


async def test_sessions_count_where_they_were_served_last(engine, folders):
    (running,) = start(engine, ask("inflight", [1], INFLIGHT, max_new_tokens=30))
    for mode in (STICKY, TURN):
        await engine.generate(ask(mode, [1], mode))
    await engine.load(manifest(1), folders[1])
    await running
    assert (engine.sessions(0), engine.sessions(1)) == (2, 1)
    await engine.generate(ask(TURN, [1], TURN))
    assert (engine.sessions(0), engine.sessions(1)) == (1, 2)


async def test_a_retiring_version_hands_its_inflight_rows_on(engine, folders):
    sticky, inflight = start(engine, *(ask(mode, [1], mode, max_new_tokens=40) for mode in (STICKY, INFLIGHT)))
    await steps(engine, 3)
    await engine.load(manifest(1), folders[1])
    await engine.retire(0)
    assert sticky.done() and not inflight.cancelled()
    assert list(engine.versions()) == [1]
    assert numbers(await inflight) == [0, 1]
    for mode in (TURN, INFLIGHT):
        assert numbers(await engine.generate(ask(f"late {mode}", [1], mode))) == [1]
    with pytest.raises(VersionUnavailable):
        await engine.generate(ask("late", [1], STICKY))


async def test_without_a_newer_one_they_finish_where_they_are(engine, folders):
    (running,) = start(engine, ask("s", [1], INFLIGHT, max_new_tokens=40))
    await steps(engine, 3)
    await engine.retire(0)
    assert numbers(await running) == [0]
    with pytest.raises(VersionUnavailable):
        await engine.generate(ask("late", [1], INFLIGHT))


async def test_an_older_version_that_is_loaded_later_moves_nobody(folders):
    """As for an evaluation that is held to a version of the past."""
    engine = make_engine()
    await engine.load(manifest(1), folders[1])
    (running,) = start(engine, ask("s", [1], INFLIGHT, version=1, max_new_tokens=30))
    await steps(engine, 3, 1)
    await engine.load(manifest(0), folders[0])
    assert numbers(await running) == [1]
    assert numbers(await engine.generate(ask("t", [1], TURN))) == [1]
    await engine.close()


async def test_whoever_leaves_at_the_moment_of_a_load_leaves_nothing(engine, folders):
    context = [1, 2, 3, 4, 5]
    running = start(engine, *(ask(f"s{i}", context, INFLIGHT, max_new_tokens=50) for i in range(4)))
    await steps(engine, 3)
    running[0].cancel()
    await engine.release("s1")
    await engine.load(manifest(1), folders[1])
    running[2].cancel()
    done = await asyncio.gather(*running, return_exceptions=True)
    assert [type(each) is asyncio.CancelledError for each in done] == [True, False, True, False]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert engine.sessions(0) + engine.sessions(1) == 4  # the one that took the steps, and all but the released one
    await engine.retire(0)
    assert list(engine.versions()) == [1]
    reused = []
    for i in (1, 2, 3):
        before = engine.stats().reused_tokens
        await engine.generate(ask(f"s{i}", context, INFLIGHT))
        reused.append(engine.stats().reused_tokens - before)
    assert reused == [0, 4, 4]  # what a cancelled request has is kept for its retry


async def test_weights_that_are_not_finite_are_named(engine, folders, tmp_path):
    bad = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    torch.nn.init.constant_(bad.model.norm.weight, torch.nan)
    bad.save_pretrained(tmp_path)
    inflight, sticky = start(engine, *(ask(mode, [1], mode, max_new_tokens=20) for mode in (INFLIGHT, STICKY)))
    await steps(engine, 3)
    await engine.load(manifest(1), str(tmp_path))
    with pytest.raises(EngineError, match="version 1 gave logits"):
        await inflight
    assert numbers(await sticky) == [0]


@pytest.mark.parametrize("inline", [True, False])
async def test_many_requests_over_two_loads(folders, models, inline):  # cases S1, S11
    engine = make_engine(inline=inline, max_sessions=24, max_batch=8)
    await engine.load(manifest(0), folders[0])
    modes = (STICKY, TURN, INFLIGHT)
    asked = [ask(f"s{i}", [i % VOCABULARY, 1], modes[i % 3], max_new_tokens=5 + i % 30) for i in range(60)]
    running = start(engine, *asked)
    for version in (1, 2):
        await running[version * 20]
        await engine.load(manifest(version), folders[version])
    for one, generation in zip(asked, await asyncio.gather(*running), strict=True):
        assert_spans(models, one.token_ids.tolist(), generation)
        assert numbers(generation) == [0] or one.update_mode is not STICKY
        assert len(generation.version_spans) == 1 or one.update_mode is INFLIGHT
    again = await asyncio.gather(*start(engine, *asked))
    assert [numbers(each) for each in again] == [[0 if one.update_mode is STICKY else 2] for one in asked]
    await engine.close()


async def test_cut_distributions_beside_plain_ones(engine, models):
    """top-p and top-k within a batch: only kept tokens are drawn, with logprobs of the distribution that was cut."""
    kinds = [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8, "temperature": 0.7}]
    room = POSITIONS - 2
    generations = await asyncio.gather(
        *(engine.generate(request(f"s{i}", [5, 6], max_new_tokens=room, **kind)) for i, kind in enumerate(kinds))
    )
    for kind, generation in zip(kinds, generations, strict=True):
        ids = torch.tensor([5, 6, *generation.token_ids.tolist()])
        with torch.no_grad():
            logits = models[0](ids[None]).logits[0].double() / kind.get("temperature", 1.0)
        ordered, order = torch.softmax(logits, -1).sort(descending=True)
        ordered[:, kind.get("top_k", VOCABULARY) :] = 0
        ordered /= ordered.sum(-1, keepdim=True)
        ordered[ordered.cumsum(-1) - ordered >= kind.get("top_p", 2.0)] = 0
        kept = torch.zeros_like(ordered).scatter(1, order, ordered / ordered.sum(-1, keepdim=True))
        rows = torch.arange(2, len(ids))
        np.testing.assert_allclose(generation.logprobs, kept[rows - 1, ids[rows]].log().numpy(), atol=1e-4)
