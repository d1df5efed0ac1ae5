"""What every `InferenceEngine` must do. Run each function of `ENGINE_SUITE` with a context of your own.

The context makes fresh engines and names folders that they can load, so the suite needs no model itself. What an engine
does with new weights while requests run is in `engine_modes.py`; the suite has it too.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import SamplingParams
from headrace.platform.records.status import FinishReason
from headrace.platform.testing.conformance.engine_context import EngineContext, raises
from headrace.platform.testing.conformance.engine_modes import ENGINE_MODES

__all__ = ["ENGINE_SUITE", "EngineContext"]

_RUNNING = 5


async def serves_every_held_version(context: EngineContext) -> None:
    """Versions are listed oldest first, each can be asked for, and others are refused."""
    engine = await context.engine(versions=2)
    held = [0, 1][-min(engine.capacity, 2) :]
    assert list(engine.versions()) == [context.number(version) for version in held]
    for version in held:
        context.check(await engine.generate(context.request(f"s{version}", version)), version)
    await engine.close()


async def refuses_versions_not_held(context: EngineContext) -> None:
    """A version that was not loaded is VersionUnavailable."""
    engine = await context.engine()
    await raises(VersionUnavailable, engine.generate(context.request("s", 1)))
    await engine.close()


async def repeats_itself(context: EngineContext) -> None:
    """The same request in another session gives the same tokens."""
    engine = await context.engine()
    first, second = [await engine.generate(context.request(session)) for session in ("a", "b")]
    assert first.token_ids.tolist() == second.token_ids.tolist()
    await engine.close()


async def ends_at_limit_or_stop(context: EngineContext) -> None:
    """The limit gives LENGTH; a stop id gives STOP and is part of the ids."""
    engine = await context.engine()
    long = await engine.generate(context.request("a", sampling=SamplingParams(max_new_tokens=6)))
    assert (len(long.token_ids), long.finish_reason) == (6, FinishReason.LENGTH)
    stop = int(long.token_ids[2])
    first = long.token_ids.tolist().index(stop)
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(stop,))
    stopped = await engine.generate(context.request("b", sampling=sampling))
    assert stopped.token_ids.tolist() == long.token_ids[: first + 1].tolist()
    assert stopped.finish_reason is FinishReason.STOP
    await engine.close()


async def serves_many_at_once(context: EngineContext) -> None:
    """Five hundred requests in one instant are all served."""  # case S11
    engine = await context.engine()
    generations = await asyncio.gather(*(engine.generate(context.request(f"s{i}")) for i in range(500)))
    for generation in generations:
        context.check(generation, 0)
    await engine.close()


async def cancels(context: EngineContext) -> None:
    """A cancelled call ends, and the engine serves on."""
    engine = await context.engine()
    call = asyncio.ensure_future(engine.generate(context.request("a", sampling=SamplingParams(max_new_tokens=50))))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    context.check(await engine.generate(context.request("a")), 0)
    await engine.close()


async def keeps_deadlines(context: EngineContext) -> None:
    """A request whose time is over is DeadlineExceeded, and the engine serves on."""
    engine = await context.engine()
    late = context.request("a", sampling=SamplingParams(max_new_tokens=50), deadline_s=0.0)
    await raises(DeadlineExceeded, engine.generate(late))
    context.check(await engine.generate(context.request("a")), 0)
    await engine.close()


async def failed_load_changes_nothing(context: EngineContext) -> None:
    """After a load that failed the engine serves exactly what it served before."""  # case S4
    engine = await context.engine()
    before = await engine.generate(context.request("a"))
    await raises(EngineError, engine.load(*context.broken))
    assert list(engine.versions()) == [context.number(0)]
    after = await engine.generate(context.request("b"))
    assert before.token_ids.tolist() == after.token_ids.tolist()
    await engine.close()


async def retires(context: EngineContext) -> None:
    """A retired version is refused; the others go on. Retiring one that is not held is fine."""
    engine = await context.engine(versions=2)
    if engine.capacity > 1:
        await engine.generate(context.request("a"))
    gone = context.number(0)
    await engine.retire(gone)
    await engine.retire(gone)
    assert gone not in engine.versions()
    await raises(VersionUnavailable, engine.generate(context.request("a")))
    context.check(await engine.generate(context.request("a", 1)), 1)
    await engine.close()


async def releases(context: EngineContext) -> None:
    """Releasing is safe for any session, and a released one may come back."""
    engine = await context.engine()
    await engine.release("never seen")
    first = await engine.generate(context.request("a"))
    await engine.release("a")
    again = await engine.generate(context.request("a"))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    await engine.close()


async def dies_on_close(context: EngineContext) -> None:
    """Closing ends running requests, and refuses later ones, with EngineDead."""
    engine = await context.engine()
    sampling = SamplingParams(max_new_tokens=50)
    calls = [asyncio.ensure_future(engine.generate(context.request(f"s{i}", 0, sampling))) for i in range(_RUNNING)]
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * _RUNNING
    await raises(EngineDead, engine.generate(context.request("late")))
    await raises(EngineDead, engine.load(*context.loadable[1]))


ENGINE_SUITE: dict[str, Callable[[EngineContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        serves_every_held_version,
        refuses_versions_not_held,
        repeats_itself,
        ends_at_limit_or_stop,
        serves_many_at_once,
        cancels,
        keeps_deadlines,
        failed_load_changes_nothing,
        retires,
        releases,
        dies_on_close,
    )
} | ENGINE_MODES
