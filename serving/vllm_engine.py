"""The vLLM engine: versions by full weights one at a time, or as LoRA adapters several at once.

::

    generate() ─► enter a version ─► vLLM ─► ids, logprobs, spans ─► generate() returns
                        ▲              │
                        └──────────────┘ an adapter came, and the request may change its weights: it goes on under it

Owns the requests, statistics and the engine's end; `VllmVersions` says who runs under what, `VllmLoader` changes it,
`VllmProcess` has the processes. Requests are woken by vLLM's output, by their deadline, or by the engine's death, which
is noticed within a fifth of a second and leaves no process behind.

The first version is a whole model, and vLLM starts with it. With adapters it is their base, and cannot be replaced.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from headrace.platform.config.serving import VLLM_START_S, VllmConfig
from headrace.platform.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError
from headrace.platform.observability.busy import BusyIntervals
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import FinishReason
from headrace.platform.records.versions import VersionManifest
from headrace.serving.engine import EngineStats
from headrace.serving.vllm_loader import VllmLoader
from headrace.serving.vllm_process import VllmProcess, carried_through, engine_error, start_vllm
from headrace.serving.vllm_requests import NOTHING, Sampled, engine_args, joined, sampled_of, sampling_args
from headrace.serving.vllm_versions import Held, Ticket, Versions
from headrace.serving.vllm_weights import FileWeights, WeightTransport, check_kind, vocabulary_of

_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine:
    """A `ServedEngine` over vLLM.

    Args:
        replica: named in every generation.
        policy_id: versions of another policy are refused.
        max_sessions: requests that vLLM is given at once; further ones wait.
        max_batch: requests that run together.
        max_positions: the longest context, in tokens.
        config: what only vLLM needs to know.
        threads: CPU threads for tensor work.
        tensor_parallel: devices that share the model.
        control_deadline_s: how long one control call of vLLM may take.
        start_deadline_s: how long vLLM may take to start; at least 300 are given.
        session_ttl_s: after so long without a request or a release a session counts as gone.
        transport: how full weights get in.
        start: starts vLLM; see `start_vllm`.
    """

    def __init__(
        self,
        *,
        replica: str,
        policy_id: str,
        max_sessions: int,
        max_batch: int,
        max_positions: int,
        config: VllmConfig,
        threads: int = 1,
        tensor_parallel: int = 1,
        control_deadline_s: float,
        start_deadline_s: float,
        session_ttl_s: float = 900.0,
        transport: WeightTransport | None = None,
        start: Callable[..., Awaitable[tuple[VllmProcess, str]]] = start_vllm,
    ) -> None:
        self._replica, self._policy_id = replica, policy_id
        self._max_batch, self._max_positions = max_batch, max_positions
        self._config, self._threads, self._tensor_parallel = config, threads, tensor_parallel
        self._control_deadline_s = control_deadline_s
        self._start_deadline_s = max(start_deadline_s, VLLM_START_S)
        self._transport = transport or FileWeights()
        self._start_vllm = start
        self._versions = Versions(replica, session_ttl_s)
        self._room = asyncio.Semaphore(max_sessions)
        self._process: VllmProcess | None = None
        self._loader: VllmLoader | None = None
        self._build = "vllm"
        self._vocabulary = 0
        self._base_hash = ""
        self._names = itertools.count(1)
        self._loading = asyncio.Lock()
        self._tickets: set[Ticket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead = ""
        self._death = asyncio.Event()
        self._busy = BusyIntervals(time.time)
        self._running = 0
        self._sampled_tokens = self._prefilled_tokens = self._reused_tokens = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample as `TokenGenerator` says.

        A context that fills the engine's positions gets no token and the finish reason LENGTH.

        Raises:
            EngineError: the request cannot be served, or the weights give logits that are not finite.
        """
        self._check(request)
        if len(request.token_ids) >= self._max_positions:
            return self._generation([NOTHING])
        loop = asyncio.get_running_loop()
        ticket = Ticket(request=request, future=loop.create_future())
        self._tickets.add(ticket)
        timer = loop.call_later(request.deadline_s, self._expire, ticket)
        work = self._spawn(self._serve(ticket))
        try:
            return await ticket.future
        finally:
            timer.cancel()
            work.cancel()
            self._tickets.discard(ticket)

    async def release(self, session: str) -> None:
        """The session samples no further (P19). Its keys and values give way when vLLM needs the room."""
        self._versions.release(session)

    def versions(self) -> Sequence[int]:
        """Versions that can be asked for, oldest first."""
        return self._versions.numbers() if not self._dead else []

    def sessions(self, version: int) -> int:
        """See `ServedEngine`."""
        return self._versions.sessions(version, time.monotonic())

    async def _serve(self, ticket: Ticket) -> None:
        """Settle a ticket. Cancelled when its caller no longer waits, which takes it out of vLLM."""
        try:
            async with self._room:
                generation = await self._sample(ticket)
        except Exception as error:  # the boundary to vLLM
            ours = engine_error(f"generation {ticket.request.key}", error)
            if isinstance(ours, EngineDead):
                self._die(str(ours))
            if not ticket.future.done():
                ticket.future.set_exception(ours)
        else:
            if not ticket.future.done():
                ticket.future.set_result(generation)

    async def _sample(self, ticket: Ticket) -> Generation:
        """In one part, or in several where adapters change under a request of mode INFLIGHT."""
        parts: list[Sampled] = []
        while not parts or parts[-1].ended == "abort":
            held = await self._versions.enter(ticket, time.monotonic())
            ticket.name = f"{self._replica}-{next(self._names)}"
            self._running += 1
            try:
                with self._busy.running():
                    parts.append(await self._run(ticket, held, parts))
            finally:
                self._running -= 1
                ticket.name = ""
                self._versions.leave(ticket)
        return self._generation(parts)

    async def _run(self, ticket: Ticket, held: Held, before: list[Sampled]) -> Sampled:
        self._check_alive()
        assert self._process is not None and self._loader is not None
        request = ticket.request
        context = np.concatenate([request.token_ids, *(part.token_ids for part in before)]).tolist()
        params = sampling_args(request, len(context) - len(request.token_ids), self._max_positions)
        output = await self._process.sample(ticket.name, context, params, held.adapter)
        adapter = held.ref if self._config.adapters else None
        sampled = sampled_of(output.outputs[0], request, self._loader.labels, adapter)
        cached = min(output.num_cached_tokens or 0, len(context))
        self._reused_tokens += cached
        self._prefilled_tokens += len(context) - cached
        self._sampled_tokens += len(sampled.token_ids)
        return sampled

    def _generation(self, parts: list[Sampled]) -> Generation:
        ids, logprobs, spans = joined(parts)
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=_ENDS[parts[-1].ended],
            version_spans=spans,
            replica=self._replica,
            engine_build=self._build,
        )

    # --- versions -----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """See `InferenceEngine`. With adapters their base counts as one of them, while it can be asked for."""
        return max(self._config.adapters, 1)

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """See `InferenceEngine`. The first load starts vLLM. Loading a held version again is fine.

        A caller who is cancelled in the middle of a change waits until it is over.

        Raises:
            EngineError: the folder cannot be loaded, or the version is of another policy or of the wrong kind.
            EngineDead: the engine is gone, did not start, or could not go back to what it served.
            ConfigError: vLLM is not installed.
        """
        self._check_alive()
        if manifest.ref.policy_id != self._policy_id:
            raise EngineError(f"{manifest.ref} is not of policy {self._policy_id!r}")
        async with self._loading:
            if self._versions.holds(manifest):
                return
            with self._versions.coming(manifest.ref.number):
                if self._loader is None:
                    await self._first(manifest, path)
                else:
                    await self._loader.load(manifest, path)

    @property
    def base_hash(self) -> str:
        """The content hash of the version that vLLM was started with; empty before it."""
        return self._base_hash

    async def load_base(self, manifest: VersionManifest, path: str) -> None:
        """Start vLLM with the version that adapters are over. Raises EngineError where it runs over another one."""
        if self._loader is not None and self._base_hash != manifest.content_hash:
            raise EngineError(f"{manifest.ref} is another base than the one that vLLM was started with")
        if self._loader is None:
            await self.load(manifest, path)

    async def retire(self, version: int) -> None:
        """Refuse new requests of a version at once, and drop it when its last one is done. Safe when not held."""
        held = self._versions.get(version)
        if held is not None and self._loader is not None:
            await self._loader.retire(held)

    async def _first(self, manifest: VersionManifest, path: str) -> None:
        check_kind(manifest.ref, manifest.kind)
        await asyncio.to_thread(self._transport.check, path)
        self._vocabulary = await asyncio.to_thread(vocabulary_of, path)
        await carried_through(self._spawn(self._start(manifest, path)))

    async def _start(self, manifest: VersionManifest, path: str) -> None:
        try:
            self._process, self._build = await self._start_vllm(
                lambda on_cpu: {
                    **self._transport.engine_args,
                    **engine_args(
                        self._config,
                        path=path,
                        on_cpu=on_cpu,
                        max_batch=self._max_batch,
                        max_positions=self._max_positions,
                        tensor_parallel=self._tensor_parallel,
                    ),
                },
                tensor_parallel=self._tensor_parallel,
                threads=self._threads,
                deadline_s=self._start_deadline_s,
                control_deadline_s=self._control_deadline_s,
                end=self._death,
            )
        except (EngineDead, ConfigError) as error:
            self._die(str(error))
            raise
        self._spawn(self._watch(self._process))
        loader = VllmLoader(
            self._process, self._versions, self._transport, self._config, base=manifest, path=path, die=self._die
        )
        await loader.first()
        self._loader = loader
        self._base_hash = manifest.content_hash

    # --- measures -----------------------------------------------------------------------------------------------------

    def busy_intervals(self, since: float) -> list[tuple[float, float]]:
        """When requests were in vLLM, as (start, end) in seconds since the epoch, from `since` on."""
        return self._busy.intervals(since)

    def stats(self) -> EngineStats:
        """Counts now. What vLLM computes again after an update is not among the prefilled tokens."""
        running = min(self._running, self._max_batch)
        return EngineStats(
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._prefilled_tokens,
            reused_tokens=self._reused_tokens,
            running=running,
            waiting=len(self._tickets) - running,
        )

    @property
    def pids(self) -> list[int]:
        """vLLM's processes, its engine core first."""
        return self._process.pids if self._process is not None else []

    # --- ends ---------------------------------------------------------------------------------------------------------

    async def wait_dead(self) -> str:
        """See `ServedEngine`."""
        await self._death.wait()
        return self._dead

    async def close(self) -> None:
        """End every request with EngineDead, and every process."""
        self._die(f"engine {self._replica} was closed")
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _watch(self, process: VllmProcess) -> None:
        """Notice vLLM's death, and reap it, however the engine came to its end."""
        gone = asyncio.ensure_future(process.wait_dead())
        death = asyncio.ensure_future(self._death.wait())
        await asyncio.wait([gone, death], return_when=asyncio.FIRST_COMPLETED)
        for waiting in (gone, death):
            waiting.cancel()
        self._die(f"vLLM of {self._replica} is gone: its engine core ended")
        await process.reap()

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            request = ticket.request
            ticket.future.set_exception(DeadlineExceeded(f"generation {request.key} took over {request.deadline_s} s"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._death.set()
        self._versions.fail(self._dead)
        for ticket in self._tickets:
            if not ticket.future.done():
                ticket.future.set_exception(EngineDead(self._dead))

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead(self._dead)

    def _check(self, request: GenerationRequest) -> None:
        self._check_alive()
        ids = request.token_ids
        if len(ids) == 0 or request.sampling.max_new_tokens < 1:
            raise EngineError(f"generation {request.key} has an empty context or may sample no token")
        if self._vocabulary and (int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary):
            raise EngineError(f"generation {request.key} has a token id outside 0..{self._vocabulary - 1}")
