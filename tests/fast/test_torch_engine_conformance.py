"""The engine suite, on the torch engine and on the scripted one."""

import sys

import numpy as np
import pytest
from torch_engine_kit import VOCABULARY, make_engine, manifest, save_model

from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import FinishReason
from headrace.platform.testing.conformance.engine import ENGINE_SUITE, EngineContext
from headrace.platform.testing.fakes.engine import SCRIPTED_LOGPROB, ScriptedEngine


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


def counting(request: GenerationRequest) -> list[int]:
    """Depends on what stands before a token alone, as greedy sampling does."""
    start = request.seed + len(request.token_ids)
    return [(start + i) % VOCABULARY for i in range(50)]


@pytest.fixture(params=["inline", "threaded", "scripted", "scripted, one version"])
def context(request, folders, tmp_path):
    def make():
        if request.param.startswith("scripted"):
            capacity = 1 if "one" in request.param else sys.maxsize
            return ScriptedEngine(counting, versions=(), unloadable=[9], capacity=capacity)
        return make_engine(inline=request.param == "inline")

    return EngineContext(
        make=make,
        loadable=[(manifest(number), folder) for number, folder in enumerate(folders)],
        broken=(manifest(9), str(tmp_path)),
        vocabulary=VOCABULARY,
    )


@pytest.mark.parametrize("check", ENGINE_SUITE.values(), ids=ENGINE_SUITE)
async def test_engine(check, context):
    await check(context)


async def test_scripted_generations_are_returned_as_they_are():
    ready = Generation(np.array([1], np.int32), np.array([-0.1], np.float32), FinishReason.STOP, ())
    engine = ScriptedEngine(lambda request: ready)
    request = GenerationRequest("k", "s", np.array([1], np.int32), 0, 0)
    assert await engine.generate(request) is ready
    assert engine.sessions(0) == 1
    await engine.release("s")
    assert engine.sessions(0) == 0


async def test_scripted_logprobs_are_constant():
    engine = ScriptedEngine(lambda request: range(100))
    generation = await engine.generate(GenerationRequest("k", "s", np.array([1], np.int32), 0, 0))
    assert generation.logprobs.tolist() == [SCRIPTED_LOGPROB] * 16
