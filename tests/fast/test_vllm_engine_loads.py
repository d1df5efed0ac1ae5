"""The engine over a vLLM that follows a script: the order of a load's steps, and what a failure of each means."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from headrace.platform.config.serving import VllmConfig
from headrace.platform.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import GenerationRequest, SamplingParams
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.serving.vllm_engine import VllmEngine
from headrace.serving.vllm_process import VllmProcess
from headrace.serving.vllm_weights import FileWeights

transformers_logging.disable_progress_bar()

STICKY, TURN, INFLIGHT = UpdateMode.STICKY, UpdateMode.TURN, UpdateMode.INFLIGHT
STEPS = ["pause keep True", "reload", "label", "resume"]


class ScriptedLlm:
    """An AsyncLLM that writes down what it is told. `hangs` and `fails` name calls that do, the latter as often as they
    are named; `gate` lets requests end."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hangs: set[str] = set()
        self.fails: list[str] = []
        self.errored = False
        self.gate = asyncio.Event()
        self.label = ""
        self.aborted: dict[str, asyncio.Event] = {}
        manager, closed = SimpleNamespace(processes=[]), Closed()
        resources = SimpleNamespace(engine_manager=manager, input_socket=closed, output_socket=closed, ctx=closed)
        self.engine_core = SimpleNamespace(resources=resources)

    async def _told(self, call: str) -> None:
        self.calls.append(call)
        name = call.split()[0]
        if name in self.hangs:
            await asyncio.Event().wait()
        if name in self.fails:
            self.fails.remove(name)
            raise RuntimeError(f"{name} failed")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._told(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, kwargs: dict) -> None:
        await self._told("reload")

    async def update_weight_version(self, label: str) -> None:
        self.label = label
        await self._told("label")

    async def resume_generation(self) -> None:
        await self._told("resume")

    async def add_lora(self, adapter: str) -> bool:
        await self._told(f"add {adapter}")
        return True

    async def remove_lora(self, serial: int) -> bool:
        await self._told(f"remove {serial}")
        return True

    async def abort(self, name: str) -> None:
        await self._told("abort")
        self.aborted[name].set()

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")


class Adapter(str):
    """What stands for a LoRARequest."""

    lora_int_id = 0


class Closed:
    """What stands for sockets and their context."""

    def close(self, linger: int) -> None:
        pass

    destroy = close


class ScriptedVllm(VllmProcess):
    """Samples token 7 as often as it may; one token where the request is taken out."""

    async def sample(self, name, context, params, adapter):
        self.llm.aborted[name] = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.llm.gate, self.llm.aborted[name])]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        out = self.llm.aborted[name].is_set()
        count = 1 if out else params["max_tokens"]
        span = SimpleNamespace(version=self.llm.label, start=0, end=count)
        completion = SimpleNamespace(
            token_ids=[7] * count,
            logprobs=SimpleNamespace(logprobs=[-1.0] * count),
            weight_versions=[span],
            finish_reason="abort" if out else "length",
        )
        return SimpleNamespace(outputs=[completion], num_cached_tokens=1)

    def adapter(self, name, serial, path):
        made = Adapter(serial)
        made.lora_int_id = serial
        return made


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(
        LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=11)
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def manifest(number: int, **ref) -> VersionManifest:
    return VersionManifest(
        ref=VersionRef("tiny", number, **ref),
        parent=None,
        parent_hash="",
        fence=1,
        kind="adapter" if ref else "full",
        content_hash=f"hash-{number}",
        batches=0,
        path="",
    )


def adapter(number: int) -> VersionManifest:
    return manifest(number, adapter_id=f"a{number}", base_hash="hash-0")


def adapter_folder(folder: str, path) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 4}')
    (path / "adapter_model.safetensors").symlink_to(f"{folder}/model.safetensors")
    return str(path)


def request(session: str, version: int = 0, mode: UpdateMode = STICKY, deadline_s: float = 30.0) -> GenerationRequest:
    ids = np.array([1, 2], np.int32)
    return GenerationRequest(session, session, ids, version, 3, SamplingParams(max_new_tokens=4), deadline_s, mode)


def numbers(generation) -> list[tuple[int, int, int]]:
    return [(span.version.number, span.start, span.end) for span in generation.version_spans]


async def turns(count: int = 20) -> None:
    """Let everything go on that can."""
    for _ in range(count):
        await asyncio.sleep(0)


def make(llm: ScriptedLlm, **options) -> VllmEngine:
    async def start(arguments, *, control_deadline_s, end, **_):
        return ScriptedVllm(llm, control_deadline_s, end), "scripted"

    defaults = {
        "replica": "r0",
        "policy_id": "tiny",
        "max_sessions": 8,
        "max_batch": 8,
        "max_positions": 32,
        "config": VllmConfig(),
        "control_deadline_s": 20.0,
        "start_deadline_s": 20.0,
        "start": start,
    }
    return VllmEngine(**{**defaults, **options})


async def loaded(llm: ScriptedLlm, folder: str, **options) -> VllmEngine:
    engine = make(llm, **options)
    await engine.load(manifest(0), folder)
    llm.calls.clear()
    return engine


async def test_weights_change_when_what_must_end_has_ended(folder):
    # P22, case S1
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    running = {
        mode: asyncio.ensure_future(engine.generate(request(mode, 0, mode))) for mode in (STICKY, TURN, INFLIGHT)
    }
    await turns()
    load = asyncio.ensure_future(engine.load(manifest(1), folder))
    while engine.versions():  # noqa: ASYNC110 (the folder is read in a thread)
        await asyncio.sleep(0.001)
    with pytest.raises(VersionUnavailable):
        await engine.generate(request("late"))
    held_back = asyncio.ensure_future(engine.generate(request("held", 0, TURN)))
    await turns()
    assert llm.calls == []
    llm.gate.set()
    await load
    assert llm.calls == STEPS and llm.label == "1.0"
    assert [numbers(await running[mode]) for mode in (STICKY, TURN)] == [[(0, 0, 4)]] * 2
    assert numbers(await held_back) == [(1, 0, 4)]
    await engine.close()


async def test_what_cannot_be_loaded_changes_nothing(folder, tmp_path):
    # case S4
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    other_policy = VersionManifest(
        ref=VersionRef("other", 1),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash="",
        batches=0,
        path="",
    )
    for wrong, path in ((manifest(1), str(tmp_path / "none")), (adapter(1), folder), (other_policy, folder)):
        with pytest.raises(EngineError):
            await engine.load(wrong, path)
    await engine.load(manifest(0), folder)
    assert llm.calls == [] and engine.versions() == [0]
    await engine.close()


async def test_a_failed_update_goes_back_to_the_old_weights(folder):
    # case S4
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    llm.fails = ["reload"]
    with pytest.raises(EngineError, match="reload failed"):
        await engine.load(manifest(1), folder)
    assert llm.calls == ["pause keep True", "reload", "reload", "resume"]
    assert engine.versions() == [0]
    llm.gate.set()
    assert numbers(await engine.generate(request("s"))) == [(0, 0, 4)]
    await engine.close()


@pytest.mark.parametrize("fails", [["reload", "reload"], ["pause"], ["label"], ["resume"]])
async def test_what_cannot_be_undone_is_death(folder, fails):
    # case S4
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    running = asyncio.ensure_future(engine.generate(request("s", 0, INFLIGHT)))
    await turns()
    llm.fails = list(fails)
    with pytest.raises(EngineDead):
        await engine.load(manifest(1), folder)
    with pytest.raises(EngineDead):
        await running
    assert f"{fails[0]} failed" in await engine.wait_dead()
    assert engine.versions() == []
    await engine.close()
    assert llm.calls[-1] == "shutdown"


@pytest.mark.parametrize("hangs", ["pause", "reload", "label", "resume"])
async def test_every_control_call_has_a_deadline(folder, hangs):
    llm = ScriptedLlm()
    engine = await loaded(llm, folder, control_deadline_s=0.05)
    llm.hangs = {hangs}
    with pytest.raises(EngineDead, match=r"took over 0\.05 s"):
        await engine.load(manifest(1), folder)
    await engine.close()


async def test_a_dead_core_ends_what_hangs(folder):
    # case S5
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    running = asyncio.ensure_future(engine.generate(request("s", 0, INFLIGHT)))
    llm.hangs = {"reload"}
    load = asyncio.ensure_future(engine.load(manifest(1), folder))
    while "reload" not in llm.calls:  # noqa: ASYNC110 (the folder is read in a thread)
        await asyncio.sleep(0.001)
    llm.errored = True
    async with asyncio.timeout(2.0):
        results = await asyncio.gather(running, load, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 2
    await engine.close()
    assert llm.calls[-1] == "shutdown"


async def test_a_cancelled_load_is_finished_first(folder):
    # case S4
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    waiting = asyncio.ensure_future(engine.generate(request("s")))
    await turns()
    load = asyncio.ensure_future(engine.load(manifest(1), folder))
    while engine.versions():  # noqa: ASYNC110 (the folder is read in a thread)
        await asyncio.sleep(0.001)
    load.cancel()  # nothing was begun
    await asyncio.wait([load])
    assert load.cancelled() and llm.calls == [] and engine.versions() == [0]
    llm.gate.set()
    await waiting
    load = asyncio.ensure_future(engine.load(manifest(1), folder))
    while not llm.calls:  # noqa: ASYNC110 (the folder is read in a thread)
        await asyncio.sleep(0)
    load.cancel()  # half of it was done
    await asyncio.wait([load])
    assert load.cancelled() and llm.calls == STEPS and engine.versions() == [1]
    await engine.close()


@pytest.mark.parametrize("error", [EngineDead("it did not start"), ConfigError("it is not installed")])
async def test_an_engine_that_does_not_start_is_dead(folder, error):
    async def start(arguments, **_):
        raise error

    engine = make(ScriptedLlm(), start=start)
    with pytest.raises(type(error), match="it "):
        await engine.load(manifest(0), folder)
    assert await engine.wait_dead() == str(error)
    with pytest.raises(EngineDead):
        await engine.generate(request("s"))
    await engine.close()


async def test_the_first_version_is_a_whole_model(folder, tmp_path):
    engine = make(ScriptedLlm(), config=VllmConfig(adapters=2))
    with pytest.raises(EngineError):
        await engine.load(adapter(1), folder)
    with pytest.raises(EngineError):
        await engine.load(manifest(0), str(tmp_path / "none"))
    await engine.load(manifest(0), folder)
    assert engine.versions() == [0] and engine.capacity == 2
    await engine.close()


async def test_requests_wait_end_late_and_are_taken_out(folder):
    llm = ScriptedLlm()
    engine = await loaded(llm, folder, max_sessions=1)
    first = asyncio.ensure_future(engine.generate(request("a")))
    second = asyncio.ensure_future(engine.generate(request("b")))
    await turns()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    with pytest.raises(DeadlineExceeded):
        await engine.generate(request("late", deadline_s=0.01))
    first.cancel()
    await turns()
    assert len(llm.aborted) == 2
    llm.gate.set()
    assert numbers(await second) == [(0, 0, 4)]
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.sampled_tokens, stats.reused_tokens, stats.prefilled_tokens) == (4, 1, 1)
    assert engine.sessions(0) == 2
    await engine.release("b")
    assert engine.sessions(0) == 1
    await engine.close()


async def test_adapters_stand_beside_each_other_and_the_oldest_gives_way(folder, tmp_path):
    # P22, cases S1 S3
    llm = ScriptedLlm()
    path = adapter_folder(folder, tmp_path / "adapter")
    engine = await loaded(llm, folder, config=VllmConfig(adapters=2))
    await engine.load(adapter(1), path)
    moving = asyncio.ensure_future(engine.generate(request("moving", 0, INFLIGHT)))
    staying = asyncio.ensure_future(engine.generate(request("staying", 1, STICKY)))
    await turns()
    assert engine.versions() == [0, 1]
    await engine.load(adapter(2), path)
    assert engine.versions() == [1, 2] and llm.calls == ["add 1", "add 2", "abort"]
    llm.gate.set()
    assert numbers(await moving) == [(1, 0, 1), (2, 1, 4)]
    assert numbers(await staying) == [(1, 0, 4)]
    await engine.load(adapter(3), path)
    assert engine.versions() == [2, 3] and llm.calls[-2:] == ["add 3", "remove 1"]
    await engine.retire(2)
    assert engine.versions() == [3] and llm.calls[-1] == "remove 2"
    await engine.retire(2)
    await engine.close()


async def test_no_request_goes_back_to_an_older_version(folder, tmp_path):
    # P22: an evaluation has older weights loaded
    llm = ScriptedLlm()
    engine = await loaded(llm, folder)
    await engine.load(manifest(5), folder)
    call = asyncio.ensure_future(engine.generate(request("s", 0, INFLIGHT)))
    await turns()
    load = asyncio.ensure_future(engine.load(manifest(4), folder))
    while engine.versions():  # noqa: ASYNC110 - the folder is checked in a thread
        await asyncio.sleep(0)
    llm.gate.set()
    assert numbers(await call) == [(5, 0, 4)]
    await load
    assert engine.versions() == [4]
    await engine.close()

    llm, path = ScriptedLlm(), adapter_folder(folder, tmp_path / "adapter")
    engine = await loaded(llm, folder, config=VllmConfig(adapters=3))
    await engine.load(adapter(5), path)
    call = asyncio.ensure_future(engine.generate(request("s", 0, INFLIGHT)))
    await turns()
    await engine.load(adapter(4), path)
    llm.gate.set()
    assert numbers(await call) == [(5, 0, 4)] and "abort" not in llm.calls
    await engine.close()


async def test_an_adapter_that_fails_to_load_changes_nothing(folder, tmp_path):
    # case S4
    llm = ScriptedLlm()
    path = adapter_folder(folder, tmp_path / "adapter")
    engine = await loaded(llm, folder, config=VllmConfig(adapters=1))
    llm.fails = ["add"]
    with pytest.raises(EngineError, match="add failed"):
        await engine.load(adapter(1), path)
    assert engine.versions() == [0]
    await engine.close()


async def test_another_transport_brings_the_weights(folder):
    class Cable(FileWeights):
        async def update(self, rpc, path):
            await rpc("cable")

    llm = ScriptedLlm()
    engine = await loaded(llm, folder, transport=Cable())
    await engine.load(manifest(1), folder)
    assert llm.calls == STEPS
    await engine.close()
