"""The engine's logprobs are those of a plain forward pass, however the tokens went through it."""

import asyncio

import pytest
from torch_engine_kit import Played, assert_logprobs, make_engine, manifest, play, play_many, request, save_model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
async def test_sessions_of_uneven_turns_in_one_batch(tmp_path, family, temperature):
    folder = save_model(tmp_path, 0, family)
    engine = make_engine()
    await engine.load(manifest(0), folder)
    played = await play_many(engine, 24, temperature=temperature)
    assert engine.stats().reused_tokens > 0
    assert_logprobs(folder, played, temperature)
    await engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_slots_that_are_taken_away_between_turns(tmp_path, temperature):
    folder = save_model(tmp_path, 0)
    engine = make_engine(max_sessions=3, max_batch=2)
    await engine.load(manifest(0), folder)
    played = await play_many(engine, 12, temperature=temperature)
    assert_logprobs(folder, played, temperature)
    await engine.close()


async def test_without_reuse_the_tokens_are_the_same(tmp_path):
    folder = save_model(tmp_path, 0)
    kept, lost = make_engine(), make_engine(max_sessions=1, max_batch=1)
    for engine in (kept, lost):
        await engine.load(manifest(0), folder)
    with_reuse, without = await play_many(kept, 8), await play_many(lost, 8)
    assert [p.ids for p in with_reuse] == [p.ids for p in without]
    assert (kept.stats().reused_tokens > 0, lost.stats().reused_tokens) == (True, 0)
    assert_logprobs(folder, without, 1.0)
    for engine in (kept, lost):
        await engine.close()


async def test_versions_side_by_side(tmp_path):
    folders = [save_model(tmp_path / str(seed), seed) for seed in range(3)]
    engine = make_engine()
    await engine.load(manifest(0), folders[0])
    first = await play_many(engine, 4)
    await engine.load(manifest(1), folders[1])
    await engine.load(manifest(2), folders[2])
    mixed = await play_many(engine, 18, versions=(0, 1, 2))
    assert_logprobs(folders[0], first, 1.0)
    for version in range(3):
        assert_logprobs(folders[version], [p for p in mixed if p.version == version], 1.0)
    await engine.close()


async def test_no_cache_crosses_versions(tmp_path):  # case S3
    folders = [save_model(tmp_path / str(seed), seed) for seed in range(2)]
    engine = make_engine()
    for version in (0, 1):
        await engine.load(manifest(version), folders[version])
    await play(engine, "s", 3, version=0, turns=1)
    reused = engine.stats().reused_tokens
    moved = await play(engine, "s", 3, version=1, turns=1)
    assert engine.stats().reused_tokens == reused
    assert_logprobs(folders[1], [moved], 1.0)
    await engine.close()


async def test_a_long_prompt_beside_short_ones(tmp_path):
    folder = save_model(tmp_path, 0)
    engine = make_engine(max_positions=60)
    await engine.load(manifest(0), folder)
    lengths = [1, 2, 3, 50, 17, 30, 1, 58]
    played = []
    contexts = [[(7 * i + j) % 61 for j in range(n)] for i, n in enumerate(lengths)]
    generations = await asyncio.gather(*(engine.generate(request(f"p{i}", c)) for i, c in enumerate(contexts)))
    for context, generation in zip(contexts, generations, strict=True):
        played.append(Played(context + generation.token_ids.tolist(), [(len(context), generation)], 0))
    assert_logprobs(folder, played, 1.0)
    assert len(generations[-1].token_ids) == 2
    await engine.close()
