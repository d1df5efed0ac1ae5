"""The gap between learner and engines, by version and replica, and an alarm that names who missed an update."""

import numpy as np
import pytest

from headrace.platform.config.learner import GrpoConfig, LearnerConfig
from headrace.platform.config.model import TinyLlamaConfig
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.gap import FEWEST_COMPARED, FEWEST_TOKENS, Gap, Source, alarms
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.samples import Sample

TINY = TinyLlamaConfig(hidden=16, layers=1, heads=2, intermediate=16, max_positions=64)
LIMIT = 0.01


def gap(replica: str, mean: float, *, version: int = 3, lag: int = 0, tokens: int = FEWEST_COMPARED) -> Gap:
    return Gap(version=version, replica=replica, lag=lag, tokens=tokens, mean=mean, largest=mean, signed=0.0)


@pytest.mark.parametrize(
    ("gaps", "accused"),
    [
        ([gap("r0", 1e-5)], []),
        ([gap("r0", 0.3)], ["r0"]),  # the same weights, and yet
        ([gap("r0", 0.3, lag=1)], []),  # what was learnt since
        ([gap("r0", 0.02, lag=1), gap("r1", 0.3, lag=1)], ["r1"]),  # unlike the other one of this version
        ([gap("r0", 0.02, lag=1), gap("r1", 0.06, lag=1)], []),
        ([gap("r0", 0.02, lag=2, version=2), gap("r1", 0.3, lag=1)], []),  # of different versions
        ([gap("r0", 0.3, tokens=FEWEST_TOKENS)], ["r0"]),
        ([gap("r0", 0.3, tokens=FEWEST_TOKENS - 1)], []),
        ([gap("r0", 0.002, lag=1, tokens=FEWEST_COMPARED - 1), gap("r1", 0.3, lag=1)], []),  # of one sure episode
        ([gap("r0", 0.002, lag=1), gap("r1", 0.3, lag=1, tokens=FEWEST_COMPARED - 1)], []),
    ],
)
def test_only_what_no_learning_explains_is_an_alarm(gaps: list[Gap], accused: list[str]) -> None:  # case S10
    found = alarms(gaps, LIMIT)
    assert [alarm.replica for alarm in found] == accused
    assert all(alarm.replica in str(alarm) and str(alarm.version) in str(alarm) for alarm in found)


def sample(name: str, behaviour: np.ndarray | None, sources: tuple[Source, ...], seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    length = 40
    mask = np.zeros(length, np.uint8)
    mask[5:] = 1
    mask[20:25] = 0  # an observation
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=rng.integers(0, 30, length).astype(np.int32),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=np.zeros(length, np.float32) if behaviour is None else behaviour,
        advantages=rng.normal(size=length).astype(np.float32),
        temperatures=np.full(length, 0.7, np.float32),
        sources=sources,
    )


def with_own_logprobs(backend: TorchBackend, samples: list[Sample]) -> list[Sample]:
    """As an engine with exactly these weights would have sampled them."""
    found = backend.logprobs(samples)
    return [sample(s.episode_id, f, s.sources, i) for i, (s, f) in enumerate(zip(samples, found, strict=True))]


def test_a_backend_measures_by_version_and_replica() -> None:
    backend = TorchBackend(build_tiny_llama(TINY, 32, 0, 0, 1), LearnerConfig())
    both = (Source(5, 20, 7, "r0"), Source(25, 40, 8, "r1"))
    batch = with_own_logprobs(
        backend, [sample("a", None, both, 0), sample("b", None, (Source(5, 40, 8, "r1"),), 1), sample("c", None, (), 2)]
    )
    batch[1].behaviour_logprobs[30] -= 0.5  # one token of r1 was sampled by other weights
    figures = backend.step(batch, build_algorithm(GrpoConfig()))
    first, second = figures.gaps
    assert (first.version, first.replica, first.tokens) == (7, "r0", 15)
    assert first.largest < 1e-5
    assert (second.version, second.replica, second.tokens) == (8, "r1", 15 + 30)
    assert second.largest == pytest.approx(0.5, abs=1e-4)
    assert second.mean == pytest.approx(0.5 / 45, abs=1e-4) and second.signed == pytest.approx(0.5 / 45, abs=1e-4)


def test_a_replica_that_missed_an_update_is_named() -> None:  # case S10
    backend = TorchBackend(build_tiny_llama(TINY, 32, 0, 0, 1), LearnerConfig(lr=0.01, warmup=0))
    whole = (Source(5, 40, 0, "r0"),)
    stale = with_own_logprobs(backend, [sample("a", None, whole, 0), sample("b", None, whole, 1)])
    backend.step(stale, build_algorithm(GrpoConfig()))
    fresh = with_own_logprobs(backend, [sample("c", None, (Source(5, 40, 1, "r1"),), 0)])
    late = [sample("d", stale[1].behaviour_logprobs, (Source(5, 40, 1, "r0"),), 1)]  # says 1, and sampled with 0
    gaps = backend.step([*fresh, *late], build_algorithm(GrpoConfig())).gaps
    assert [(alarm.replica, alarm.version) for alarm in alarms(gaps, LIMIT)] == [("r0", 1)]
