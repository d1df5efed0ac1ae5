"""Answers that are nobody's episode: each request is rendered, sampled and forgotten. Nothing here is trained on.

A request that has a key is remembered for a while, so that a client that lost the answer can have it again (P24).
"""

import asyncio
import itertools
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

from headrace.actors.harness.asking import Language, fingerprint
from headrace.actors.harness.replies import answered, read
from headrace.platform.contracts import Answered, Asked, RefusalCode, TokenGenerator
from headrace.platform.errors import DeadlineExceeded, DoorRefused, EngineDead
from headrace.platform.records.generation import GenerationRequest, SamplingParams
from headrace.platform.records.status import UpdateMode

_GREEDY = 1e-5  # temperatures below it leave nothing to chance but rounding
_REMEMBERED = 256  # answers to requests with a key
_VERSION = re.compile(r"(?:@?v)(\d{1,18})")


class UnrecordedAnswers:
    """See the module.

    Args:
        model: what the policy is called; `MODEL@v3` asks for one version, `MODEL` for the newest.
        versions: those that can be sampled from now.
        max_tokens: the longest context, prompt and answer together.
    """

    def __init__(
        self,
        language: Language,
        generator: TokenGenerator,
        model: str,
        versions: Callable[[], Sequence[int]],
        max_tokens: int,
        deadline_s: float,
    ) -> None:
        self._language, self._generator = language, generator
        self._model, self._versions = model, versions
        self._max_tokens, self._deadline_s = max_tokens, deadline_s
        self._serial = itertools.count()
        self._known: OrderedDict[str, tuple[str, asyncio.Task[Answered]]] = OrderedDict()

    async def answer(self, asked: Asked) -> Answered:
        """Sample an answer. Raises DoorRefused, EngineError and DeadlineExceeded."""
        if not asked.retry_key:
            return await self._sampled(asked)
        digest = fingerprint(asked)
        known = self._known.get(asked.retry_key)
        if known is not None and known[0] != digest:
            raise DoorRefused("this Idempotency-Key belongs to another request", RefusalCode.CONFLICT)
        if known is None or (known[1].done() and (known[1].cancelled() or known[1].exception() is not None)):
            known = self._known[asked.retry_key] = digest, asyncio.create_task(self._sampled(asked))
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return await asyncio.shield(known[1])

    async def _sampled(self, asked: Asked) -> Answered:
        version, update_mode = self._version(asked.model)
        prompt = self._language.prompt(asked)
        room = self._max_tokens - len(prompt)
        if room < 1:
            told = f"the prompt has {len(prompt)} tokens; this model's context holds {self._max_tokens}"
            raise DoorRefused(told, RefusalCode.INVALID, "messages" if asked.prompt is None else "prompt")
        serial = next(self._serial)
        session = f"door/{secrets.token_hex(8)}"
        request = GenerationRequest(
            key=f"{session}/0/{serial}",
            session=session,
            token_ids=prompt,
            version=version,
            seed=secrets.randbits(63) if asked.sampling.seed is None else asked.sampling.seed,
            sampling=self._sampling(asked, room),
            deadline_s=self._deadline_s,
            update_mode=update_mode,
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                generation = await self._generator.generate(request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"nothing was sampled within {self._deadline_s:g} s") from error
        finally:
            await self._generator.release(session)
        ids, renderer = generation.token_ids.tolist(), self._language.renderer
        said = read(renderer, ids, has_tools=bool(asked.tools), is_text=asked.prompt is not None)
        return answered(asked, renderer, prompt, generation, said, serial)

    def _sampling(self, asked: Asked, room: int) -> SamplingParams:
        wanted = asked.sampling
        is_greedy = wanted.temperature is not None and wanted.temperature < _GREEDY
        return SamplingParams(
            max_new_tokens=min(wanted.max_tokens or room, room),
            temperature=1.0 if wanted.temperature is None or is_greedy else wanted.temperature,
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            top_k=1 if is_greedy else wanted.top_k or 0,
            stop_token_ids=self._language.renderer.stop_token_ids,
        )

    def _version(self, model: str) -> tuple[int, UpdateMode]:
        """The version to ask for. Who wants the newest is served under a newer one, should it come meanwhile (P22)."""
        held = self._versions()
        if not held:
            raise EngineDead("no version can be sampled from now")
        if model in ("", self._model):
            return max(held), UpdateMode.TURN
        match = _VERSION.fullmatch(model.removeprefix(self._model))
        if match is None or int(match[1]) not in held:
            known = ", ".join([self._model, *(f"{self._model}@v{number}" for number in held)])
            raise DoorRefused(f"there is no model {model!r} here; there are {known}", RefusalCode.UNKNOWN, "model")
        return int(match[1]), UpdateMode.STICKY
