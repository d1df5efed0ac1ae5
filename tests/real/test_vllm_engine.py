"""Real vLLM on generated checkpoints: started once for full weights, and once for adapters after that one is dead.

The tests of a file run in order and share the engine; each begins by loading what it needs, which any version can be.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.config.serving import VllmConfig
from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.status import FinishReason, UpdateMode
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.testing.conformance.engine import ENGINE_SUITE, EngineContext
from headrace.serving.vllm_engine import VllmEngine
from headrace.serving.vllm_weights import FileWeights, Rpc
from headrace.trainer.backends.torch import TorchBackend

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

VOCABULARY = 61
POSITIONS = 256
LONG = list(range(1, 60)) * 2


def build(seed: int, **sizes) -> LlamaForCausalLM:
    """vLLM on a CPU wants heads of 32. The head is tied: a reload must reach what vLLM has packed of it, too."""
    torch.manual_seed(seed)
    config = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**config, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three versions of one model."""
    root = tmp_path_factory.mktemp("versions")
    for number in range(3):
        build(number).save_pretrained(root / str(number))
    return [str(root / str(number)) for number in range(3)]


def manifest(number: int, kind: str = "full", **ref: str) -> VersionManifest:
    return VersionManifest(
        ref=VersionRef("tiny", number, **ref),
        parent=None,
        parent_hash="",
        fence=1,
        kind=kind,
        content_hash=f"hash-{number}",
        batches=0,
        path="",
    )


def make_engine(config: VllmConfig, **options) -> VllmEngine:
    return VllmEngine(
        replica="r0",
        policy_id="tiny",
        max_sessions=512,
        max_batch=64,
        max_positions=POSITIONS,
        config=config,
        control_deadline_s=60.0,
        start_deadline_s=300.0,
        **options,
    )


def request(
    session: str,
    ids: list[int],
    version: int = 0,
    seed: int = 5,
    mode: UpdateMode = UpdateMode.STICKY,
    deadline_s: float = 60.0,
    **sampling,
) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(
        f"{session}/{len(ids)}", session, np.array(ids, np.int32), version, seed, params, deadline_s, mode
    )


def differences(model, asked: GenerationRequest, got: Generation) -> np.ndarray:
    """Of each token: the logprob reported from log_softmax(logits / T) of a plain forward pass."""
    ids = asked.token_ids.tolist() + got.token_ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    expected = torch.log_softmax(logits / asked.sampling.temperature, -1)
    rows = torch.arange(len(asked.token_ids) - 1, len(ids) - 1)
    wanted = expected[rows, torch.tensor(got.token_ids, dtype=torch.int64)].numpy()
    return np.abs(wanted - got.logprobs)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (a folder is read in a thread)
        await asyncio.sleep(0)


def model_in(folder: str):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def assert_serves(engine: VllmEngine, folder: str, version: int) -> None:
    """Logprobs of the distribution sampled from, over two turns whose context begins with what is in the caches."""
    model = model_in(folder)
    for temperature in (1.0, 0.7):
        asked = request("a", LONG, version, temperature=temperature)
        got = await engine.generate(asked)
        assert differences(model, asked, got).max() <= 1e-3
        then = request("a", [*LONG, *got.token_ids.tolist(), 7, 8], version, temperature=temperature)
        got = await engine.generate(then)
        assert differences(model, then, got).max() <= 1e-3
        (span,) = got.version_spans
        assert (span.version, span.start, span.end) == (manifest(version).ref, 0, 8)


class FailingWeights(FileWeights):
    """Fails after the workers have taken the new weights, when told to."""

    fails = False

    async def update(self, rpc: Rpc, path: str) -> None:
        await super().update(rpc, path)
        if self.fails:
            self.fails = False
            raise OSError("the cable is out")


@pytest.fixture(scope="module")
def transport() -> FailingWeights:
    return FailingWeights()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folders, transport) -> AsyncIterator[VllmEngine]:
    engine = make_engine(VllmConfig(kv_cache_mib=32), transport=transport)
    await engine.load(manifest(0), folders[0])
    yield engine
    await engine.close()


async def test_logprobs_before_and_after_updates(engine, folders):
    # case S3: the same prompts under each version; keys and values of another would show
    for version in (0, 1, 2, 0):
        await engine.load(manifest(version), folders[version])
        assert list(engine.versions()) == [version]
        await assert_serves(engine, folders[version], version)


async def test_an_episodes_turns_reuse_keys_and_values(engine, folders):
    await engine.load(manifest(1), folders[1])
    got = await engine.generate(request("turns", LONG, 1))
    before = engine.stats()
    context = [*LONG, *got.token_ids.tolist(), 3]
    await engine.generate(request("turns", context, 1))
    after = engine.stats()
    reused, prefilled = after.reused_tokens - before.reused_tokens, after.prefilled_tokens - before.prefilled_tokens
    assert reused + prefilled == len(context)
    assert prefilled <= 64


async def test_seeds_alone_decide(engine, folders):
    await engine.load(manifest(0), folders[0])
    alone = await engine.generate(request("a", [1, 2, 3], seed=1))
    crowd = await asyncio.gather(*(engine.generate(request(f"s{seed}", [1, 2, 3], seed=seed)) for seed in range(40)))
    assert crowd[1].token_ids.tolist() == alone.token_ids.tolist()
    assert len({tuple(got.token_ids.tolist()) for got in crowd}) > 20


async def test_more_prompts_than_a_step_can_compute(engine, folders):
    # case S11
    await engine.load(manifest(0), folders[0])
    asked = [request(f"s{i}", [i % VOCABULARY, *LONG, *LONG[:80]], seed=i, max_new_tokens=4) for i in range(100)]
    got = await asyncio.gather(*(engine.generate(each) for each in asked))
    model = model_in(folders[0])
    assert differences(model, asked[-1], got[-1]).max() <= 1e-3
    assert all(len(each.token_ids) == 4 for each in got)


async def test_limits_of_a_generation(engine, folders):
    await engine.load(manifest(0), folders[0])
    full = await engine.generate(request("a", [1] * POSITIONS))
    assert (len(full.token_ids), full.finish_reason, full.version_spans) == (0, FinishReason.LENGTH, ())
    nearly = await engine.generate(request("a", [1] * (POSITIONS - 2)))
    assert (len(nearly.token_ids), nearly.finish_reason) == (2, FinishReason.LENGTH)
    greedy = await engine.generate(request("a", [1, 2], temperature=0.0))
    assert greedy.logprobs.tolist() == [0.0] * 8
    narrow = await engine.generate(request("a", [1, 2], top_k=1))
    assert narrow.token_ids.tolist() == greedy.token_ids.tolist()
    for wrong in (request("a", [VOCABULARY]), request("a", []), request("a", [1], temperature=0.001)):
        with pytest.raises(EngineError):
            await engine.generate(wrong)


async def test_inflight_goes_on_over_an_update(engine, folders):
    # P22, cases S1 S3
    await engine.load(manifest(0), folders[0])
    asked = [request(f"i{i}", [1, 2, 3 + i], 0, i, UpdateMode.INFLIGHT, max_new_tokens=200) for i in range(7)]
    running = [asyncio.ensure_future(engine.generate(each)) for each in asked]
    await engine.generate(request("ahead", [1, 2, 3], max_new_tokens=20))
    await engine.load(manifest(1), folders[1])
    old, new = model_in(folders[0]), model_in(folders[1])
    for each, got in zip(asked, await asyncio.gather(*running), strict=True):
        first, second = got.version_spans
        assert (first.version.number, first.start) == (0, 0)
        assert (second.version.number, second.start, second.end) == (1, first.end, 200)
        assert differences(old, each, got)[: first.end].max() <= 1e-3
        assert differences(new, each, got)[first.end :].max() <= 1e-3


async def test_sticky_ends_first_and_turn_is_held_back(engine, folders):
    # P22, case S1
    await engine.load(manifest(0), folders[0])
    sticky = asyncio.ensure_future(engine.generate(request("s", [1, 2, 3], max_new_tokens=150)))
    await engine.generate(request("ahead", [1, 2, 3]))
    load = asyncio.ensure_future(engine.load(manifest(1), folders[1]))
    await until(lambda: not engine.versions())
    turn = asyncio.ensure_future(engine.generate(request("t", [1, 2, 3], mode=UpdateMode.TURN)))
    with pytest.raises(VersionUnavailable):
        await engine.generate(request("late", [1, 2, 3]))
    assert not load.done()
    await load
    assert sticky.done()
    assert [span.version.number for span in (await sticky).version_spans] == [0]
    assert [span.version.number for span in (await turn).version_spans] == [1]
    assert engine.sessions(0) >= 1 and engine.sessions(1) >= 1
    await engine.release("t")


async def test_broken_folders_change_nothing(engine, folders, tmp_path):
    # case S4
    await engine.load(manifest(0), folders[0])
    torn, other, wide = tmp_path / "torn", tmp_path / "other", tmp_path / "wide"
    shutil.copytree(folders[1], torn)
    os.truncate(torn / "model.safetensors", 5000)
    build(5, intermediate_size=64).save_pretrained(other)
    shutil.copytree(other, wide)
    shutil.copy(Path(folders[0]) / "config.json", wide / "config.json")
    for folder in (torn, other, wide, tmp_path / "none"):
        with pytest.raises(EngineError):
            await engine.load(manifest(9), str(folder))
    altered = msgspec.structs.replace(manifest(0), content_hash="another")
    for wrong in (manifest(9, "adapter", adapter_id="a", base_hash="hash-0"), altered):
        with pytest.raises(EngineError):
            await engine.load(wrong, folders[1])
    assert list(engine.versions()) == [0]
    await assert_serves(engine, folders[0], 0)


async def test_an_update_that_fails_half_way_is_undone(engine, folders, transport):
    # case S4
    await engine.load(manifest(0), folders[0])
    asked = request("i", [1, 2, 3], 0, 3, UpdateMode.INFLIGHT, max_new_tokens=200)
    running = asyncio.ensure_future(engine.generate(asked))
    await engine.generate(request("ahead", [1, 2, 3]))
    transport.fails = True
    with pytest.raises(EngineError, match="the cable is out"):
        await engine.load(manifest(1), folders[1])
    assert list(engine.versions()) == [0]
    await assert_serves(engine, folders[0], 0)
    got = await running
    assert [span.version.number for span in got.version_spans] == [0]
    assert differences(model_in(folders[0]), asked, got).max() <= 1e-3


async def test_a_cancelled_load_is_carried_through(engine, folders):
    # case S4
    await engine.load(manifest(0), folders[0])
    load = asyncio.ensure_future(engine.load(manifest(1), folders[1]))
    await until(lambda: engine.versions() != [0])
    load.cancel()
    await asyncio.wait([load])
    (version,) = engine.versions()
    await assert_serves(engine, folders[version], version)


async def test_deadlines_and_cancellation_take_requests_out(engine, folders):
    await engine.load(manifest(0), folders[0])
    with pytest.raises(DeadlineExceeded):
        await engine.generate(request("late", [1, 2], deadline_s=0.05, max_new_tokens=250))
    call = asyncio.ensure_future(engine.generate(request("gone", [1, 2], max_new_tokens=250)))
    await engine.generate(request("ahead", [1, 2, 3]))
    call.cancel()
    await asyncio.wait([call])
    await engine.generate(request("next", [1, 2, 3]))
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert engine.busy_intervals(0.0)


class Shared:
    """One engine for a suite that makes and closes many."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("check", [name for name in ENGINE_SUITE if name != "dies_on_close"])
async def test_conformance(engine, folders, tmp_path, check):
    context = EngineContext(
        make=lambda: Shared(engine),
        loadable=[(manifest(number), folders[number]) for number in (0, 1)],
        broken=(manifest(7), str(tmp_path)),
        vocabulary=VOCABULARY,
    )
    await ENGINE_SUITE[check](context)


async def test_a_killed_core_is_noticed_and_reaped(engine, folders):
    # case S5
    await engine.load(manifest(0), folders[0])
    family = [psutil.Process(pid) for pid in engine.pids]
    calls = [asyncio.ensure_future(engine.generate(request(f"s{i}", [1], max_new_tokens=250))) for i in range(5)]
    await engine.generate(request("ahead", [1, 2, 3]))
    started = time.monotonic()
    os.kill(engine.pids[0], signal.SIGKILL)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert "gone" in await engine.wait_dead()
    assert time.monotonic() - started < 2.0
    assert [type(result) for result in results] == [EngineDead] * 5
    for call in (engine.generate(request("late", [1])), engine.load(manifest(1), folders[1])):
        with pytest.raises(EngineDead):
            await call
    await engine.close()
    assert not any(process.is_running() for process in family)


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three adapters over the first version; the number of an adapter's version is its place, from 1."""
    root = tmp_path_factory.mktemp("adapters")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    for number in (1, 2, 3):
        model = model_in(folders[0])
        torch.manual_seed(number)
        get_peft_model(model, settings).save_pretrained(root / str(number))
    return ["", *(str(root / str(number)) for number in (1, 2, 3))]


def adapter(number: int, base_hash: str = "hash-0") -> VersionManifest:
    return manifest(number, "adapter", adapter_id=f"a{number}", base_hash=base_hash)


def adapted(folders, adapters, number: int):
    model = model_in(folders[0])
    return PeftModel.from_pretrained(model, adapters[number]).eval() if number else model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lora(folders) -> AsyncIterator[VllmEngine]:
    engine = make_engine(VllmConfig(kv_cache_mib=32, adapters=2, max_lora_rank=8))
    await engine.load(manifest(0), folders[0])
    yield engine
    await engine.close()


async def test_adapters_are_served_at_once(lora, folders, adapters, tmp_path):
    # P22, cases S3 S4
    assert lora.capacity == 2
    await lora.load(adapter(1), adapters[1])
    assert list(lora.versions()) == [0, 1]
    asked = {number: request("a", LONG, number, temperature=0.7) for number in (0, 1, 0)}
    got = await asyncio.gather(*(lora.generate(each) for each in asked.values()))
    for number, generation in zip(asked, got, strict=True):
        assert differences(adapted(folders, adapters, number), asked[number], generation).max() <= 1e-3
        assert [span.version.number for span in generation.version_spans] == [number]
    empty = tmp_path / "empty"
    empty.mkdir()
    for refused, folder in (
        (adapter(5, "another base"), adapters[2]),
        (manifest(5), folders[1]),
        (adapter(5), str(empty)),
    ):
        with pytest.raises(EngineError):
            await lora.load(refused, folder)
    assert list(lora.versions()) == [0, 1]


async def test_inflight_moves_to_the_new_adapter(lora, folders, adapters):
    # P22, cases S1 S3
    await lora.load(adapter(1), adapters[1])
    asked = [request(f"i{i}", [1, 2, 3 + i], 1, i, UpdateMode.INFLIGHT, max_new_tokens=200) for i in range(3)]
    running = [asyncio.ensure_future(lora.generate(each)) for each in asked]
    sticky = asyncio.ensure_future(lora.generate(request("sticky", [1, 2, 3], 0, max_new_tokens=100)))
    await lora.generate(request("ahead", [1, 2, 3], 1, max_new_tokens=20))
    await lora.load(adapter(2), adapters[2])
    assert list(lora.versions()) == [1, 2]
    assert [span.version.number for span in (await sticky).version_spans] == [0]
    old, new = (adapted(folders, adapters, number) for number in (1, 2))
    for each, got in zip(asked, await asyncio.gather(*running), strict=True):
        first, second = got.version_spans
        assert (first.version, first.start) == (adapter(1).ref, 0)
        assert (second.version, second.start, second.end) == (adapter(2).ref, first.end, 200)
        assert differences(old, each, got)[: first.end].max() <= 1e-3
        assert differences(new, each, got)[first.end :].max() <= 1e-3


async def test_a_retired_adapter_makes_room(lora, folders, adapters):
    await lora.retire(1)
    assert list(lora.versions()) == [2]
    with pytest.raises(VersionUnavailable):
        await lora.generate(request("a", [1], 1))
    await lora.load(adapter(3), adapters[3])
    asked = request("a", LONG, 2, mode=UpdateMode.TURN)
    got = await lora.generate(asked)
    assert [span.version for span in got.version_spans] == [adapter(3).ref]
    assert differences(adapted(folders, adapters, 3), asked, got).max() <= 1e-3


async def test_an_adapter_as_the_learner_publishes_it_is_served(lora, folders, tmp_path):
    """In every linear layer; what vLLM samples from is what the learner computes."""
    config = LearnerConfig(lora={"rank": 8, "alpha": 16})
    learner = TorchBackend(folders[0], config)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1)
    for name, data in learner.weights().items():
        (tmp_path / name).write_bytes(data)
    await lora.load_base(manifest(0), folders[0])
    assert lora.base_hash == "hash-0"
    await lora.load(adapter(4), str(tmp_path))
    asked = request("a", LONG, 4)
    got = await lora.generate(asked)
    assert differences(learner.model, asked, got).max() <= 1e-3
    assert differences(model_in(folders[0]), asked, got).max() > 1e-2
    with pytest.raises(EngineError, match="another base"):
        await lora.load_base(manifest(1), folders[1])


async def test_closing_ends_everything(lora):
    family = [psutil.Process(pid) for pid in lora.pids]
    calls = [asyncio.ensure_future(lora.generate(request(f"s{i}", [1], 3, max_new_tokens=250))) for i in range(5)]
    await lora.generate(request("ahead", [1, 2], 3))
    await lora.close()
    assert [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == [EngineDead] * 5
    assert not any(process.is_running() for process in family)
