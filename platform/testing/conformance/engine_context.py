"""What the engine suites run against, and what they look at in every generation."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.platform.contracts import InferenceEngine
from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.versions import VersionManifest


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineContext:
    """What the suite runs against.

    `make` returns a fresh engine that holds no version. `loadable` are at least two versions, oldest first, with the
    folders to load them from, and `broken` is one whose load fails. Engines sample at least 50 tokens when asked to,
    with ids below `vocabulary`, and their logprobs repeat to within `tolerance`.
    """

    make: Callable[[], InferenceEngine]
    loadable: Sequence[tuple[VersionManifest, str]]
    broken: tuple[VersionManifest, str]
    vocabulary: int
    tolerance: float = 1e-3

    async def engine(self, versions: int = 1) -> InferenceEngine:
        """A fresh engine that has loaded the first `versions` of `loadable`, and holds what it has room for."""
        engine = self.make()
        for manifest, path in self.loadable[:versions]:
            await engine.load(manifest, path)
        return engine

    def number(self, version: int) -> int:
        """The number of the version at index `version` of `loadable`."""
        return self.loadable[version][0].ref.number

    def request(
        self,
        session: str,
        version: int = 0,
        sampling: SamplingParams | None = None,
        deadline_s: float = 60.0,
        update_mode: UpdateMode = UpdateMode.STICKY,
        token_ids: Sequence[int] = (1, 2, 3),
    ) -> GenerationRequest:
        """A request for the version at index `version` of `loadable`."""
        return GenerationRequest(
            key=f"{session}/0",
            session=session,
            token_ids=np.array(token_ids, np.int32),
            version=self.number(version),
            seed=11,
            sampling=sampling or SamplingParams(max_new_tokens=4),
            deadline_s=deadline_s,
            update_mode=update_mode,
        )

    def check(self, generation: Generation, version: int) -> None:
        """A whole generation of the version at index `version`."""
        self.check_tokens(generation)
        (span,) = generation.version_spans
        assert span.version == self.loadable[version][0].ref, f"the span names version {self.number(version)}: {span}"

    def check_tokens(self, generation: Generation) -> None:
        """Ids, logprobs and spans hold together."""
        ids, logprobs = generation.token_ids, generation.logprobs
        assert ids.dtype == np.int32 and logprobs.dtype == np.float32, "ids are i32 and logprobs f32"
        assert len(ids) == len(logprobs) > 0, "one logprob a token"
        assert ids.min() >= 0 and ids.max() < self.vocabulary, "ids are of the vocabulary"
        assert np.isfinite(logprobs).all() and logprobs.max() <= 0.0, "logprobs are logarithms of probabilities"
        assert generation.replica and generation.engine_build, "a generation says who sampled it"
        spans = generation.version_spans
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        assert starts == [0, *ends[:-1]] and ends[-1] == len(ids), f"spans cover every token, in order: {spans}"
        assert all(span.start < span.end for span in spans), f"no span is empty: {spans}"
        numbers = [span.version.number for span in spans]
        assert numbers == sorted(set(numbers)), f"versions never go back: {spans}"

    def check_same(self, one: Generation, other: Generation) -> None:
        """The same tokens, with the same logprobs."""
        assert one.token_ids.tolist() == other.token_ids.tolist(), "the same tokens"
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=self.tolerance)


async def raises(kind: type[Exception], work: Awaitable[object]) -> None:
    """Assert that `work` ends with this error."""
    try:
        await work
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")
