"""benchmarks/async_bound.py on a small machine: the lag bound holds, seeds decide everything, the figures are right."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import async_bound

        yield async_bound
    for name in [name for name in sys.modules if name.split(".")[0] in ("async_bound", "simulation", "common")]:
        del sys.modules[name]


def small(bench: Any) -> Any:
    """As the benchmark's machine, a tenth of its size."""
    return bench.Setting(slots=36, group_size=4, batch_groups=7)


def play(bench: Any, seed: int = 0, **policy: Any) -> Any:
    run = bench.Simulation(small(bench), bench.Policy(name="", **policy), seed)
    return run.run(steps=30, warm_up=5)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"early_missing": 1, "lag_restarts": 2},
        {"over_lag": "wait"},
        {"over_lag": "mask", "turn": True},
    ],
    ids=["drop", "early", "wait", "mask"],
)
def test_nothing_over_the_limit_is_ever_trained(bench: Any, policy: dict[str, Any], max_lag: int) -> None:  # P14, P15
    tally = play(bench, max_lag=max_lag, **policy)
    assert tally.violations == 0
    assert tally.worst_lag <= max_lag
    assert tally.trained > 0


def test_the_same_seed_gives_the_same_run(bench: Any) -> None:
    one, same, other = (play(bench, seed, max_lag=3, early_missing=1, lag_restarts=2) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_waiting_discards_nothing(bench: Any) -> None:  # P15
    tally = play(bench, max_lag=2, over_lag="wait")
    assert tally.discarded == 0
    assert tally.held_s > 0


def test_closing_early_saves_what_dropping_loses(bench: Any) -> None:  # P18
    dropping = play(bench, max_lag=3)
    closing = play(bench, max_lag=3, early_missing=1)
    assert closing.discarded_share < dropping.discarded_share
    assert set(closing.fates) >= {"trained", "cancelled:lag"}


def test_masking_keeps_long_episodes(bench: Any) -> None:  # P15, P16
    assert play(bench, max_lag=3, over_lag="mask", turn=True).long_share > play(bench, max_lag=3).long_share


def test_a_tally_by_hand(bench: Any) -> None:
    from simulation.durations import Durations
    from simulation.tally import Attempt, Tally

    tally = Tally(Durations(20.0, 300.0), limit=2, began_s=0.0)
    tally.ended(Attempt(10.0, played_s=10.0, live=1.0, fate="trained"))
    tally.ended(Attempt(300.0, played_s=300.0, live=0.5, fate="trained"))
    tally.ended(Attempt(400.0, played_s=90.0, fate="cancelled:lag"))
    tally.ended(Attempt(30.0, fate="cancelled:lag"))
    for lag in (0, 2, 3):
        tally.token_lag(lag)
    assert (tally.trained, tally.discarded, tally.useful, tally.violations, tally.worst_lag) == (2, 2, 1.5, 1, 3)
    assert tally.discarded_share == 0.5
    assert tally.discarded_slot_share == pytest.approx(90 / 400)
    assert tally.long_share == pytest.approx(150 / 160 / tally.durations.longer_share(240.0))
    assert tally.deciles[2] == 1.0 and tally.deciles[9] == 0.25


def test_durations_by_hand(bench: Any) -> None:
    durations = bench.Setting().durations
    # sigma = ln(15) / 2.3263 = 1.1641; the mean is 20 exp(sigma^2 / 2); P(X > 240) by tokens is 1 - Phi(0.9705)
    assert durations.mean_s == pytest.approx(39.38, abs=0.02)
    assert durations.longer_share(240.0) == pytest.approx(0.1659, abs=0.0005)
    assert [durations.decile(seconds) for seconds in (1.0, 20.1, 299.0)] == [0, 5, 9]
    assert bench.Setting().ideal == pytest.approx(336 / durations.mean_s)
