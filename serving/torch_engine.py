"""The torch engine: continuous batching of any Hugging Face causal model on the CPU, several versions at once.

::

    generate() ─► line ─► prepare ─► step ─► settle ─► generate() returns
                             ▲                 │
                             └─────────────────┘ while anything runs

    prepare  takes abandoned requests out of their batches, lets waiting ones in
    step     for each version one forward pass and one sampled token a row
    settle   gives slots back and results out

Owns the driver of this loop, the versions, deadlines and statistics; scheduler, batch, slots, forward pass and sampling
are modules of their own. A version that is loaded meets the running requests at the next `prepare`: those of mode
INFLIGHT change to its batch with the tokens that they have, and everything before the next one is computed anew under
its weights. What a seed draws at a position does not depend on the version.

Bookkeeping happens on the event loop between steps. A step runs in one worker thread, so that the loop keeps serving
sockets, or inline on the loop: then the same requests in the same order give the same results to the last digit.
Requests are woken by the step that ends them, by their deadline, or by the engine's death.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.observability.busy import BusyIntervals
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import FinishReason, UpdateMode
from headrace.platform.records.versions import ADAPTER, VersionManifest
from headrace.serving.batch import Finished, RunningBatch
from headrace.serving.engine import EngineStats
from headrace.serving.forward import ModelRunner
from headrace.serving.model_loader import ModelLoader
from headrace.serving.sampling import draw, uniforms
from headrace.serving.scheduler import Scheduler
from headrace.serving.ticket import Ticket

_STICKY = UpdateMode.STICKY


class TorchEngine:
    """An `InferenceEngine` over torch and transformers.

    Args:
        replica: named in every generation.
        max_sessions: sessions whose keys and values are kept; further requests wait, idle sessions give way.
        max_batch: requests that run together, per version.
        max_positions: the longest context, in tokens.
        policy_id: versions of another policy are refused.
        threads: CPU threads for tensor work.
        inline: step on the event loop instead of in a thread.
        session_ttl_s: after so long without a request or a release a session counts as gone.
    """

    def __init__(
        self,
        *,
        replica: str,
        max_sessions: int,
        max_batch: int,
        max_positions: int,
        policy_id: str,
        threads: int = 1,
        inline: bool = False,
        session_ttl_s: float = 900.0,
    ) -> None:
        self._replica, self._policy_id, self._inline = replica, policy_id, inline
        build = f"torch-{torch.__version__}/transformers-{transformers.__version__}/cpu-fp32"
        self._scheduler = Scheduler(
            max_sessions=max_sessions,
            max_batch=max_batch,
            max_positions=max_positions,
            session_ttl_s=session_ttl_s,
            replica=replica,
            build=build,
        )
        self._build = build
        self._runner = ModelRunner(self._scheduler.table)
        self._loader = ModelLoader(max_positions)
        self._models: dict[int, nn.Module] = {}
        self._base: nn.Module | None = None
        self._base_hash = ""
        self._manifests: dict[int, VersionManifest] = {}
        self._retiring: dict[int, asyncio.Event] = {}
        self._loading = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._dead = ""
        self._death = asyncio.Event()
        self._vocabulary = 0
        self._busy = BusyIntervals(time.time)
        self._busy_s = 0.0
        self._sampled_tokens = 0
        torch.set_num_threads(threads)
        # torch keeps the number of threads per calling thread.
        self._executor = ThreadPoolExecutor(1, f"engine-{replica}", torch.set_num_threads, (threads,))

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample under `request.version` or, by its mode, the newest one held; see `TokenGenerator`.

        A context that fills the engine's positions gets no token and the finish reason LENGTH.

        Raises:
            EngineError: the request cannot be served, or the weights give logits that are not finite.
        """
        version = self._check(request)
        if len(request.token_ids) >= self._scheduler.table.positions:
            return self._no_room()
        loop = asyncio.get_running_loop()
        ticket = self._scheduler.submit(request, version, loop.create_future(), time.monotonic())
        timer = loop.call_later(request.deadline_s, self._expire, ticket)
        if self._driver is None:
            self._driver = loop.create_task(self._drive())
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._scheduler.abandon(ticket)
            raise
        finally:
            timer.cancel()

    async def release(self, session: str) -> None:
        """The session samples no further (P19)."""
        self._scheduler.release(session)

    def versions(self) -> Sequence[int]:
        """Versions that can be asked for, oldest first."""
        return sorted(version for version in self._models if version not in self._retiring) if not self._dead else []

    def sessions(self, version: int) -> int:
        """Live sessions that `version` served last."""
        return self._scheduler.sessions(version, time.monotonic())

    # --- versions ---

    @property
    def capacity(self) -> int:
        """See `InferenceEngine`: as many as the memory holds."""
        return sys.maxsize

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Load a version beside the others; it appears when it is whole (case S4). Loading a held one again is fine.

        Running and waiting requests whose mode allows it go on under it, if it is newer than theirs.

        Raises:
            EngineError: the folder cannot be loaded, the version is of another policy, or it is an adapter over
                another base than this engine's.
        """
        self._check_alive()
        ref = manifest.ref
        if ref.policy_id != self._policy_id:
            raise EngineError(f"{ref} is not of policy {self._policy_id!r}")
        is_adapter = manifest.kind == ADAPTER
        if is_adapter and (self._base is None or self._base_hash != ref.base_hash):
            raise EngineError(f"{ref} is an adapter, and this engine does not hold its base")
        async with self._loading:
            held = self._manifests.get(ref.number)
            if held is not None:
                if held.content_hash == manifest.content_hash and ref.number not in self._retiring:
                    return
                raise EngineError(f"{ref} is held already, with other content or on its way out")
            if is_adapter:
                model = await self._loaded(self._loader.load_adapter, path, self._base)
            else:
                model = await self._loaded(self._loader.load, path, next(iter(self._models.values()), None))
            config: Any = model.config
            self._vocabulary = int(config.get_text_config(decoder=True).vocab_size)
            self._scheduler.open(ref)
            self._manifests[ref.number] = manifest
            self._models[ref.number] = model

    @property
    def base_hash(self) -> str:
        """The content hash of what its adapters are over; empty before `load_base`."""
        return self._base_hash

    async def load_base(self, manifest: VersionManifest, path: str) -> None:
        """Hold the weights that adapters are over, from now on. They are shared with a version of the same content.

        Raises:
            EngineError: the folder cannot be loaded.
        """
        self._check_alive()
        async with self._loading:
            found = (n for n, held in self._manifests.items() if held.content_hash == manifest.content_hash)
            held = next(found, None)
            if held is not None:
                self._base = self._models[held]
            else:
                self._base = await self._loaded(self._loader.load, path, next(iter(self._models.values()), None))
            self._base_hash = manifest.content_hash

    async def _loaded(self, load: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
        model = load(*arguments) if self._inline else await asyncio.to_thread(load, *arguments)
        self._check_alive()
        return model

    async def retire(self, version: int) -> None:
        """Refuse new requests of a version at once, and drop it when its last one is done. Safe when not held."""
        if version not in self._models:
            return
        done = self._retiring.setdefault(version, asyncio.Event())
        self._scheduler.has_news = True
        if self._driver is None:
            self._notice_drained()
        await done.wait()

    async def wait_dead(self) -> str:
        """See `ServedEngine`."""
        await self._death.wait()
        return self._dead

    async def close(self) -> None:
        """End every request with EngineDead and release everything."""
        self._die(f"engine {self._replica} was closed")
        if self._driver is not None:
            await asyncio.wait([self._driver])
        self._executor.shutdown(wait=False)
        self._models.clear()
        self._base = None
        self._scheduler.batches.clear()

    # --- measures ---

    @property
    def busy(self) -> float:
        """Seconds spent in steps."""
        return self._busy_s

    def busy_intervals(self, since: float) -> list[tuple[float, float]]:
        """When steps ran, as (start, end) in seconds since the epoch, from `since` on."""
        return self._busy.intervals(since)

    def stats(self) -> EngineStats:
        """Counts now."""
        return EngineStats(
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._scheduler.prefilled_tokens,
            reused_tokens=self._scheduler.reused_tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )

    # --- the loop ---

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._dead and self._scheduler.prepare():
                start_s = time.perf_counter()
                with self._busy.running():
                    if self._inline:
                        finished = self._step()
                    else:
                        finished = await loop.run_in_executor(self._executor, self._step_until_news)
                self._busy_s += time.perf_counter() - start_s
                self._settle(finished)
                if self._inline:
                    await asyncio.sleep(0)
        except Exception as error:  # a step that fails leaves rows and slots in an unknown state
            self._die(f"engine {self._replica} failed: {type(error).__name__}: {error}")
        finally:
            self._driver = None
            self._notice_drained()

    def _step_until_news(self) -> list[Finished]:
        while True:
            finished = self._step()
            if finished or self._scheduler.has_news:
                return finished

    def _step(self) -> list[Finished]:
        finished: list[Finished] = []
        for version, batch in list(self._scheduler.batches.items()):
            if len(batch):
                finished += self._advance(self._models[version], batch)
        return finished

    def _advance(self, model: nn.Module, batch: RunningBatch) -> list[Finished]:
        rows = batch.rows
        logits = self._runner.logits(model, rows)
        numbers = uniforms(rows["seed"], rows["position"] + 1)
        tokens, logprobs = draw(logits, rows["temperature"], numbers, batch.truncated)
        broken = rows["slot"][tokens < 0].tolist()
        if broken:
            self._runner.clear(broken)
        self._sampled_tokens += len(tokens) - len(broken)
        return batch.record(tokens, logprobs)

    def _settle(self, finished: list[Finished]) -> None:
        self._scheduler.settle(finished)
        for row in finished:
            future = row.ticket.future
            if future.done():
                continue
            if row.generation is not None:
                future.set_result(row.generation)
            else:
                future.set_exception(EngineError(f"version {row.ticket.version} gave logits that are not finite"))
        self._notice_drained()

    # --- ends ---

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            seconds = ticket.request.deadline_s
            ticket.future.set_exception(DeadlineExceeded(f"generation {ticket.request.key} took over {seconds} s"))
            self._scheduler.abandon(ticket)

    def _notice_drained(self) -> None:
        """Only between steps: during one, a row that has ended is in neither its batch nor its slot."""
        for version, done in list(self._retiring.items()):
            if self._dead or not self._scheduler.is_used(version):
                self._scheduler.close(version)
                del self._models[version], self._manifests[version], self._retiring[version]
                done.set()

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._death.set()
        self._scheduler.fail_all(self._dead)
        for done in self._retiring.values():
            done.set()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead(self._dead)

    def _check(self, request: GenerationRequest) -> int:
        """The version that is to serve it."""
        self._check_alive()
        version, ids = request.version, request.token_ids
        if request.update_mode is not _STICKY:
            version = max(version, max(self.versions(), default=version))
        if version not in self._models or version in self._retiring:
            raise VersionUnavailable(f"engine {self._replica} does not hold version {version}: {self.versions()}")
        if len(ids) == 0 or request.sampling.max_new_tokens < 1:
            raise EngineError(f"generation {request.key} has an empty context or may sample no token")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise EngineError(f"generation {request.key} has a token id outside 0..{self._vocabulary - 1}")
        return version

    def _no_room(self) -> Generation:
        nothing = np.zeros(0, np.float32)
        return Generation(
            token_ids=np.zeros(0, np.int32),
            logprobs=nothing,
            finish_reason=FinishReason.LENGTH,
            version_spans=(),
            replica=self._replica,
            engine_build=self._build,
        )
