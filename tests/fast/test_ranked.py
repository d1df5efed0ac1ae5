"""A backend over ranks, which are threads here: what is merged, and what a rank costs that fails (P13)."""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from learner_kit import World
from run_kit import RECIPES
from test_torch_backend import CONFIG, batch, tiny

from headrace.deploy.checks import check_learner
from headrace.deploy.placement import plan
from headrace.deploy.resume import check_ranks
from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, PartDied, RunFailed
from headrace.platform.testing.fakes.learning import FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends import build_backend
from headrace.trainer.backends.deepspeed_engine import pieces
from headrace.trainer.backends.ranked import RankedBackend, RankStep
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import pack
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.step_loss import StepLoss

DEADLINE_S = 60.0


class ThreadRanks:
    """`Ranks` in threads. `ended` says whether somebody has ended them."""

    def __init__(self, *held: Any) -> None:
        self.size = len(held)
        self.ended = threading.Event()
        self._held = held
        self._threads = ThreadPoolExecutor(len(held))

    def ask(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return [self._threads.submit(getattr(rank, method), *arguments) for rank in self._held]

    def end(self) -> None:
        self.ended.set()
        self._threads.shutdown(wait=False)


class HalfRank:
    """Computes every second microbatch, and takes no step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._forward = TokenLogprobs(tiny())

    def step(self, samples: Sequence[Any], algorithm: Any) -> RankStep:
        loss = StepLoss(samples, self._forward, algorithm, None, "here")
        for micro in pack(samples, 16)[self._rank :: 2]:
            loss(micro)
        return RankStep(statistics=loss.statistics, grad_norm=2.0, lr=0.5)

    def logprobs(self, samples: Sequence[Any]) -> dict[int, Any]:
        return {n: np.full(one.length, -n) for n, one in enumerate(samples) if n % 2 == self._rank}

    def weights(self) -> dict[str, bytes]:
        return {} if self._rank else {"model.safetensors": b"w"}

    def save(self) -> dict[str, bytes]:
        return {f"rank-{self._rank}.state": b"%d" % self._rank}


class Acting:
    """A rank that does `act`, whatever it is asked."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *_: self._act()


def raising(error: Exception) -> Acting:
    def act() -> None:
        raise error

    return Acting(act)


def ranked(*held: Any, deadline_s: float = DEADLINE_S) -> tuple[RankedBackend, ThreadRanks]:
    ranks = ThreadRanks(*held)
    return RankedBackend(ranks, deadline_s, grace_s=0.05), ranks


def test_the_figures_of_a_step_are_those_of_one_process() -> None:
    backend, _ = ranked(HalfRank(0), HalfRank(1))
    algorithm = build_algorithm(GrpoConfig())
    found = backend.step(batch(0), algorithm)
    expected = TorchBackend(tiny(), CONFIG).step(batch(0), algorithm)
    assert (found["grad_norm"], found["lr"]) == (2.0, 0.5)
    for name in expected.keys() - {"grad_norm", "lr"}:
        assert found[name] == pytest.approx(expected[name], abs=1e-6), name
    assert found.episodes.keys() == expected.episodes.keys()
    backend.close()


def test_answers_are_joined() -> None:
    backend, _ = ranked(HalfRank(0), HalfRank(1))
    assert [row[0] for row in backend.logprobs(batch(0))] == [0, -1, -2, -3, -4, -5]
    assert backend.weights() == {"model.safetensors": b"w"}
    assert backend.save() == {"rank-0.state": b"0", "rank-1.state": b"1"}
    backend.close()


@pytest.mark.parametrize("error", [ArithmeticError("not finite"), ValueError("no token"), RunFailed("another step")])
def test_what_all_ranks_refuse_alike_is_raised_and_they_go_on(error: Exception) -> None:
    backend, ranks = ranked(raising(error), raising(error))
    with pytest.raises(type(error), match=str(error)):
        backend.step([], build_algorithm(GrpoConfig()))
    assert not ranks.ended.is_set()
    backend.close()


def test_a_rank_that_is_lost_ends_all_and_is_named() -> None:
    """P13. The other one notices too, and first: it is not to blame."""
    lost = threading.Event()

    def dies() -> None:
        lost.wait(DEADLINE_S)
        raise PartDied("killed")

    def notices() -> None:
        lost.set()
        raise RuntimeError("Connection closed by peer")

    backend, ranks = ranked(Acting(notices), Acting(dies))
    with pytest.raises(PartDied, match=r"^learner rank 1 died: killed$"):
        backend.weights()
    assert ranks.ended.is_set()
    with pytest.raises(PartDied, match="learner rank 1 died: killed"):
        backend.save()


def test_a_rank_that_hangs_ends_all_within_the_deadline() -> None:
    """P13"""
    backend, ranks = ranked(Acting(dict), Acting(lambda: ranks.ended.wait(DEADLINE_S)), deadline_s=0.05)
    with pytest.raises(PartDied, match=r"learner ranks \[1\] gave no answer to 'weights' within 0.05 s"):
        backend.weights()
    assert ranks.ended.is_set()


def test_a_rank_that_fails_alone_ends_all() -> None:
    """The other one waits for it, in the middle of a step."""
    backend, ranks = ranked(Acting(dict), raising(MemoryError("no room")))
    with pytest.raises(PartDied, match="learner rank 1 failed in 'weights': MemoryError: no room"):
        backend.weights()
    assert ranks.ended.is_set()


async def test_a_lost_rank_costs_the_step_and_the_groups_are_given_back(tmp_path) -> None:
    """P13"""

    class Lost(FakeBackend):
        def step(self, samples: Any, algorithm: Any) -> Any:
            raise PartDied("learner rank 1 died: killed")

    world = World(tmp_path)
    learner = world.learner(Lost())
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(PartDied, match="learner rank 1 died"):
        await learner.step()
    stats = await world.ledger.stats()
    assert (stats.groups_leased, stats.groups_ready, stats.head, stats.holds) == (0, 2, 0, True)
    following = world.learner()
    await following.start(takeover=True)
    assert (await following.step()).version == 1
    assert (await world.ledger.stats()).fates == {"trained": 4, "in_flight": 0}
    await following.close()


def test_weights_are_cut_into_pieces_by_bytes() -> None:
    import torch

    named = [(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))]
    cut = [[name for name, _ in piece] for piece in pieces(named, 16)]
    assert cut == [["a", "b"], ["c"], ["d", "e"]]
    assert list(pieces([], 16)) == []


def recipe(*changes: str) -> Any:
    return load_recipe("lookup", ["learner.backend=deepspeed", *changes], RECIPES)


def test_what_cannot_be_is_refused_before_a_run_starts() -> None:
    check_learner(recipe("learner.ranks=2"))
    with pytest.raises(ConfigError, match=r"runtime\.kind=inprocess has one; use learner\.backend=torch"):
        check_learner(recipe("runtime.kind=inprocess"))
    with pytest.raises(ConfigError, match=r"offload_optimizer=true needs learner\.deepspeed\.stage 1, 2 or 3"):
        check_learner(recipe("learner.deepspeed.offload_optimizer=true", "learner.deepspeed.stage=0"))
    with pytest.raises(ConfigError, match=r"needs runtime\.kind=ray"):
        build_backend(recipe().learner, "nowhere")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("learner.ranks=4", "learner.ranks from 2 to 4"),
        ("learner.deepspeed.stage=3", "learner.deepspeed.stage from 2 to 3"),
        ("learner.backend=torch", "learner.backend from deepspeed to torch"),
    ],
)
def test_a_resumed_run_keeps_its_ranks(change: str, named: str) -> None:
    """P13: the shards of other ranks are not these ranks' shards."""
    before = recipe("learner.ranks=2").learner
    check_ranks(before, recipe("learner.ranks=2", "learner.lr=0.1").learner)
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_ranks(before, recipe("learner.ranks=2", change).learner)


@pytest.mark.parametrize(
    "change", ["learner.lora={rank: 4}", "learner.lora={rank: 8, alpha: 64}", "learner.lora.rank=0"]
)
def test_a_resumed_run_keeps_its_adapters(change: str) -> None:
    def lora(change: str) -> LearnerConfig:
        return load_recipe("lookup", [change], RECIPES).learner

    with pytest.raises(ConfigError, match=r"learner\.lora\.\w+ from "):
        check_ranks(lora("learner.lora={rank: 8}"), lora(change))
    check_ranks(lora("learner.lr=1e-4"), lora("learner.lr=1e-3"))


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.deploy.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[deepspeed\]', or use learner\.backend=torch"):
        check_learner(recipe())


def test_each_rank_has_its_share_and_the_learner_sits_beside_the_first() -> None:
    seats = plan(recipe("learner.ranks=2", "resources.learner.cpus=3")).seats
    assert [(seats[name].bundle, seats[name].cpus) for name in ("learner-0", "learner-1", "learner")] == [
        (0, 3.0),
        (1, 3.0),
        (0, 0.0),
    ]
    assert "learner" not in plan(load_recipe("lookup", [], RECIPES)).seats
