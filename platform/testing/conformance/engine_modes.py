"""What an `InferenceEngine` does with new weights while requests run, for each update mode (P22).

Where weights are to arrive in the middle of a generation, several sessions ask for long ones again and again until the
load is over, so that some are half done at that moment however fast the engine is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.platform.contracts import InferenceEngine
from headrace.platform.errors import VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.status import UpdateMode
from headrace.platform.testing.conformance.engine_context import EngineContext, raises

_STICKY, _TURN, _INFLIGHT = UpdateMode.STICKY, UpdateMode.TURN, UpdateMode.INFLIGHT
_SESSIONS = 4
_LONG = 50


@dataclass(kw_only=True, slots=True)
class _Load:
    """What was asked for while the second version was loaded; `later` are those asked for when it was there."""

    greedy: bool = False
    is_over: bool = False
    done: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)
    later: list[Generation] = field(default_factory=list)

    async def ask(self, context: EngineContext, engine: InferenceEngine, mode: UpdateMode, session: int) -> None:
        """Ask until the load is over, and once more."""
        sampling = SamplingParams(max_new_tokens=_LONG, temperature=0.0 if self.greedy else 1.0)
        is_later = False
        while not is_later:
            is_later = self.is_over
            name = f"s{session}/{len(self.done)}"
            request = context.request(name, 0, sampling, update_mode=mode, token_ids=(1 + session, 2, 3))
            generation = await engine.generate(request)
            self.done.append((request, generation))
            if is_later:
                self.later.append(generation)


async def _over_a_load(context: EngineContext, engine: InferenceEngine, mode: UpdateMode, greedy: bool) -> _Load:
    load = _Load(greedy=greedy)
    asking = [asyncio.ensure_future(load.ask(context, engine, mode, session)) for session in range(_SESSIONS)]
    await engine.generate(context.request("ahead"))
    await engine.load(*context.loadable[1])
    load.is_over = True
    await asyncio.gather(*asking)
    for _, generation in load.done:
        context.check_tokens(generation)
    return load


async def moving_modes_take_the_newest(context: EngineContext) -> None:
    """TURN and INFLIGHT requests for an older version get the newest that is held; STICKY ones never do."""
    engine = await context.engine(versions=2)
    for mode in (_TURN, _INFLIGHT):
        for version in (0, 1):
            generation = await engine.generate(context.request(f"{mode}{version}", version, update_mode=mode))
            context.check(generation, 1)
    if engine.capacity > 1:
        context.check(await engine.generate(context.request("sticky", 0)), 0)
    else:
        await raises(VersionUnavailable, engine.generate(context.request("sticky", 0)))
    await engine.close()


async def no_mode_goes_back(context: EngineContext) -> None:
    """Where only older versions are held, no mode serves the request: versions never go back."""
    engine = await context.engine()
    for mode in UpdateMode:
        await raises(VersionUnavailable, engine.generate(context.request(f"{mode}", 1, update_mode=mode)))
    await engine.close()


async def sticky_and_turn_finish_on_their_version(context: EngineContext) -> None:
    """What runs when a version comes is unmoved by it, to the last token."""  # case S1
    engine = await context.engine()
    sampling = SamplingParams(max_new_tokens=_LONG)
    alone = await engine.generate(context.request("alone", 0, sampling))
    running = [
        asyncio.ensure_future(engine.generate(context.request(f"{mode}{i}", 0, sampling, update_mode=mode)))
        for i in range(_SESSIONS)
        for mode in (_STICKY, _TURN)
    ]
    await engine.generate(context.request("ahead"))
    await engine.load(*context.loadable[1])
    for generation in await asyncio.gather(*running):
        context.check(generation, 0)
        context.check_same(generation, alone)
    context.check(await engine.generate(context.request("after", 1)), 1)
    await engine.close()


async def turns_are_of_one_version(context: EngineContext) -> None:
    """Over a load, each TURN generation is of one version; those asked for after it are of the new one."""  # case S1
    engine = await context.engine()
    load = await _over_a_load(context, engine, _TURN, greedy=False)
    for _, generation in load.done:
        assert len(generation.version_spans) == 1, f"one version a turn: {generation.version_spans}"
    for generation in load.later:
        context.check(generation, 1)
    await engine.close()


async def inflight_goes_on_under_the_new_weights(context: EngineContext) -> None:
    """Over a load, generations go on: the spans say where, and what follows is what the new weights say of all that
    stands before it, not of keys and values of the old ones."""  # cases S1, S3
    engine = await context.engine()
    load = await _over_a_load(context, engine, _INFLIGHT, greedy=True)
    await engine.close()
    for generation in load.later:
        context.check(generation, 1)
    mixed = [(request, generation) for request, generation in load.done if len(generation.version_spans) > 1]
    assert mixed, "some generation was half done when the load was over"
    fresh = context.make()
    await fresh.load(*context.loadable[1])
    for request, generation in mixed:
        old, new = generation.version_spans
        assert [span.version for span in (old, new)] == [manifest.ref for manifest, _ in context.loadable[:2]]
        ids = generation.token_ids.tolist()
        sampling = SamplingParams(max_new_tokens=len(ids) - old.end, temperature=0.0)
        seen = [*request.token_ids.tolist(), *ids[: old.end]]
        again = await fresh.generate(context.request(f"again {request.key}", 1, sampling, token_ids=seen))
        assert again.token_ids.tolist() == ids[old.end :], "the new weights' own continuation"
    await fresh.close()


async def no_cache_crosses_versions(context: EngineContext) -> None:
    """The same prompt of the same session before and after a load gives what a fresh engine gives."""  # case S3
    engine = await context.engine()
    await engine.generate(context.request("s", 0, update_mode=_TURN))
    await engine.load(*context.loadable[1])
    moved = await engine.generate(context.request("s", 0, update_mode=_TURN))
    fresh = context.make()
    await fresh.load(*context.loadable[1])
    context.check(moved, 1)
    context.check_same(moved, await fresh.generate(context.request("s", 1)))
    for each in (engine, fresh):
        await each.close()


async def a_full_engine_gives_up_its_oldest(context: EngineContext) -> None:
    """It holds as many versions as it has room for, the newest ones."""
    engine = await context.engine(versions=len(context.loadable))
    numbers = [context.number(version) for version in range(len(context.loadable))]
    assert engine.capacity >= 1
    assert list(engine.versions()) == numbers[-min(engine.capacity, len(numbers)) :]
    await engine.close()


ENGINE_MODES: dict[str, Callable[[EngineContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        moving_modes_take_the_newest,
        no_mode_goes_back,
        sticky_and_turn_finish_on_their_version,
        turns_are_of_one_version,
        inflight_goes_on_under_the_new_weights,
        no_cache_crosses_versions,
        a_full_engine_gives_up_its_oldest,
    )
}
