"""An inference engine that says what it is told to: no model, no waiting, hardly any cost.

Owns nothing but the versions that it was given; honours stop ids, limits and update modes, so that what it returns
could have been sampled. Its logprobs are one constant. Where a version comes while an INFLIGHT reply is under way, the
second half of it is the new version's.
"""

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import FinishReason, UpdateMode
from headrace.platform.records.versions import VersionManifest, VersionRef, VersionSpan

SCRIPTED_LOGPROB = -0.5
_STICKY, _INFLIGHT = UpdateMode.STICKY, UpdateMode.INFLIGHT
Replies: TypeAlias = Callable[[GenerationRequest], Sequence[int] | Generation]


class ScriptedEngine:
    """An `InferenceEngine` whose tokens come from a function.

    Args:
        replies: token ids for a request, cut at the request's limit or first stop id; or a whole Generation, which is
            returned as it is.
        versions: versions held from the start, without a load.
        policy_id: of those versions.
        replica: named in every generation.
        unloadable: numbers whose load fails.
        capacity: how many versions it holds; a load beyond that gives up the oldest.
    """

    def __init__(
        self,
        replies: Replies,
        *,
        versions: Sequence[int] = (0,),
        policy_id: str = "scripted",
        replica: str = "scripted",
        unloadable: Collection[int] = (),
        capacity: int = sys.maxsize,
    ) -> None:
        self._replies = replies
        self._refs = {number: VersionRef(policy_id, number) for number in versions}
        self._replica = replica
        self._capacity = capacity
        self._unloadable = frozenset(unloadable)
        self._sessions: dict[str, int] = {}
        self._closed = False

    async def generate(self, request: GenerationRequest) -> Generation:
        """The scripted reply, after one turn of the event loop."""
        ref = self._refs.get(request.version) if request.update_mode is _STICKY else self._ref(request)
        if ref is None:
            self._refuse(request)
            raise VersionUnavailable(f"version {request.version} is not held: {self.versions()}")
        self._sessions[request.session] = ref.number
        await asyncio.sleep(0)
        if self._closed or request.deadline_s <= 0:
            self._refuse(request)
        reply = self._replies(request)
        return reply if isinstance(reply, Generation) else self._generation(request, reply, ref)

    async def release(self, session: str) -> None:
        """The session is over."""
        self._sessions.pop(session, None)

    def versions(self) -> Sequence[int]:
        """Held versions, oldest first."""
        return sorted(self._refs)

    @property
    def capacity(self) -> int:
        """As many as it was told."""
        return self._capacity

    def sessions(self, version: int) -> int:
        """Sessions that `version` served last and that were not released."""
        return sum(held == version for held in self._sessions.values())

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Hold a version; `path` is not looked at."""
        if self._closed:
            raise EngineDead("the scripted engine was closed")
        if manifest.ref.number in self._unloadable:
            raise EngineError(f"{manifest.ref} cannot be loaded")
        self._refs[manifest.ref.number] = manifest.ref
        while len(self._refs) > self._capacity:
            del self._refs[min(self._refs)]

    async def retire(self, version: int) -> None:
        """Drop a version; safe when it is not held."""
        self._refs.pop(version, None)

    async def close(self) -> None:
        """Every call from now on, and every one under way, raises EngineDead."""
        self._closed = True
        self._refs.clear()

    def _ref(self, request: GenerationRequest) -> VersionRef | None:
        """The version that serves a request now whose mode moves."""
        return self._refs.get(max(request.version, max(self._refs, default=request.version)))

    def _refuse(self, request: GenerationRequest) -> None:
        if self._closed:
            raise EngineDead("the scripted engine was closed")
        if request.deadline_s <= 0:
            raise DeadlineExceeded(f"generation {request.key} took over {request.deadline_s} s")

    def _generation(self, request: GenerationRequest, reply: Sequence[int], first: VersionRef) -> Generation:
        last = first
        if request.update_mode is _INFLIGHT:
            last = self._ref(request) or first
            self._sessions[request.session] = last.number
        stops = request.sampling.stop_token_ids
        ids = np.array(reply[: request.sampling.max_new_tokens], np.int32)
        stopped = np.flatnonzero(np.isin(ids, stops))[:1]
        if len(stopped):
            ids = ids[: stopped[0] + 1]
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), SCRIPTED_LOGPROB, np.float32),
            finish_reason=FinishReason.STOP if len(stopped) else FinishReason.LENGTH,
            version_spans=_spans(first, last, len(ids)),
            replica=self._replica,
            engine_build="scripted",
        )


def _spans(first: VersionRef, last: VersionRef, length: int) -> tuple[VersionSpan, ...]:
    half = length // 2
    if first == last or half == 0:
        return (VersionSpan(last, 0, length),)
    return VersionSpan(first, 0, half), VersionSpan(last, half, length)
