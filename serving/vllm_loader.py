"""How a running vLLM takes up versions: by full weights in place of the last, or as adapters beside each other.

::

    full weights   check ─► give the old one up, what must end on it ends ─► pause (keep, clear caches) ─► update
                   ─► label ─► resume
    adapters       check ─► where there is no room give the oldest up, what must end on it ends ─► add
                   ─► move requests of mode INFLIGHT ─► remove the oldest

Owns the order of these steps and what a failure of each means. Until the check is over and what must end has ended, a
load can fail or be cancelled and nothing has changed. From there on it is carried through whatever becomes of its
caller. A step that fails half-way is undone; one that cannot be undone, or does not answer in time, is the engine's
death, so that a mixture is never served (case S4). Keys and values never cross versions (case S3): full weights clear
the caches, and vLLM files what it computed under an adapter by the adapter's name, which is never used twice.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.platform.config.serving import VllmConfig
from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.serving.vllm_process import VllmProcess, carried_through, engine_error
from headrace.serving.vllm_versions import Held, Versions
from headrace.serving.vllm_weights import WeightTransport, check_adapter, check_kind

T = TypeVar("T")


class VllmLoader:
    """The loads of one running vLLM, one at a time.

    Args:
        vllm: the running vLLM.
        versions: what is held, and what runs on it.
        transport: how full weights get in.
        config: how many adapters, and of which rank.
        base: the version that vLLM was started with.
        path: the folder of `base`.
        die: told the reason when the engine is over.
    """

    def __init__(
        self,
        vllm: VllmProcess,
        versions: Versions,
        transport: WeightTransport,
        config: VllmConfig,
        *,
        base: VersionManifest,
        path: str,
        die: Callable[[str], None],
    ) -> None:
        self.labels: dict[str, VersionRef] = {}
        """The version behind every label that vLLM names in its spans."""
        self._vllm, self._versions, self._transport = vllm, versions, transport
        self._config, self._base, self._path = config, base, path
        self._die = die
        self._serials = itertools.count(1)
        self._steps: set[asyncio.Task[None]] = set()

    async def first(self) -> None:
        """Make the version that vLLM was started with available. Raises EngineDead."""
        await self._or_die(self._label(self._base.ref))
        self._versions.add(Held(manifest=self._base, path=self._path))

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Take up a version. Raises EngineError, EngineDead."""
        step: Callable[[Held, Held | None], Coroutine[Any, Any, None]]
        if self._config.adapters:
            await asyncio.to_thread(check_adapter, manifest, path, self._base, self._config.max_lora_rank)
            room, step = self._config.adapters, self._add_adapter
        else:
            check_kind(manifest.ref, manifest.kind)
            await asyncio.to_thread(self._transport.check, path)
            room, step = 1, self._change_weights
        new = Held(manifest=manifest, path=path)
        oldest = self._versions.oldest() if len(self._versions) >= room else None
        if oldest is None:
            await self._carry_through(step(new, None))
            return
        with self._versions.giving_up(oldest):
            if oldest.ref.number < new.ref.number:
                await self._versions.until_only_inflight(oldest)
            else:  # P22: no request goes back
                await self._versions.until_empty(oldest)
            await self._carry_through(step(new, oldest))

    async def retire(self, held: Held) -> None:
        """Drop a version once what runs on it has ended. Raises EngineDead."""
        with self._versions.giving_up(held):
            await self._versions.until_empty(held)
            await self._carry_through(self._drop(held))

    async def _change_weights(self, new: Held, old: Held | None) -> None:
        """P22: pause (keep, clear caches), update, resume."""
        vllm = self._vllm
        await self._or_die(vllm.control("pausing", vllm.llm.pause_generation(mode="keep", clear_cache=True)))
        try:
            await self._transport.update(vllm.rpc, new.path)
        except (DeadlineExceeded, EngineDead) as error:
            self._die(str(error))
            raise EngineDead(str(error)) from error
        except Exception as error:  # the boundary to whatever brings weights
            await self._or_die(self._transport.update(vllm.rpc, self._path))
            await self._or_die(vllm.control("resuming", vllm.llm.resume_generation()))
            raise engine_error(f"loading {new.ref}", error) from error
        self._path = new.path
        await self._or_die(self._label(new.ref))
        if old is None:
            self._versions.add(new)
        else:
            self._versions.replace(old, new)
        await self._or_die(vllm.control("resuming", vllm.llm.resume_generation()))

    async def _add_adapter(self, new: Held, oldest: Held | None) -> None:
        vllm, serial = self._vllm, next(self._serials)
        new.adapter = vllm.adapter(f"{new.ref}/{serial}", serial, new.path)
        try:
            taken = await vllm.control(f"loading {new.ref}", vllm.llm.add_lora(new.adapter))
        except (DeadlineExceeded, EngineDead) as error:
            self._die(str(error))
            raise EngineDead(str(error)) from error
        if not taken:
            raise EngineError(f"vLLM did not take the adapter in {new.path}")
        self._versions.add(new)
        for ticket in self._versions.movable(new.ref.number):
            await self._or_die(vllm.control("moving a request", vllm.llm.abort(ticket.name)))
        if oldest is not None:
            await self._versions.until_empty(oldest)
            await self._drop(oldest)

    async def _drop(self, held: Held) -> None:
        if held.adapter is not None:
            removal = self._vllm.llm.remove_lora(held.adapter.lora_int_id)
            await self._or_die(self._vllm.control("removing an adapter", removal))
        self._versions.drop(held)

    async def _label(self, ref: VersionRef) -> None:
        """From here on vLLM names these weights in the spans of what it samples."""
        label = f"{ref.number}.{ref.lineage}"
        self.labels[label] = ref
        await self._vllm.control("labelling", self._vllm.llm.update_weight_version(label))

    async def _carry_through(self, step: Coroutine[Any, Any, None]) -> None:
        """Half of a step is a mixture (case S4)."""
        task = asyncio.get_running_loop().create_task(step)
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        await carried_through(task)

    async def _or_die(self, call: Awaitable[T]) -> T:
        """A call without which nobody knows what the engine would serve."""
        try:
            return await call
        except Exception as error:  # whatever it is, the engine is over
            self._die(str(error))
            raise EngineDead(str(error)) from error
