"""How much a strict lag bound costs: the real ledger and pacer under a simulated clock (`simulation/run.py`).

Episodes take 20 s at the median and 300 s at the 99th percentile; groups of 8, batches of 256 episodes, learner steps
of 30 s, 336 slots: slots and learner are exactly in balance, so that whatever is wasted is lost. For every lag limit:

- `early closing`: headrace under `sticky`. One version a group (P18); a group whose last chance has come is closed
  without its last member, or the last two, and a group that is lost to lag all the same is played again (P16).
- `plain dropping`: what is over the limit leaves.
- `plain waiting`: the learner starts no step that would push a group over the limit, but waits 600 s at most.
- `turn, mask`: turns move to the newest version, tokens over the limit leave the loss (P15).

The figure is useful throughput over the ideal, min(slots / mean duration, batch / step), in episodes; an episode some
of whose tokens are masked counts by its share of live tokens. `long_tokens` is the share of trained tokens that come
from episodes over 240 s, over their natural share: 1 is no bias, and what a policy buys with bias shows there and in
`deciles`, trained over ended by length, shortest tenth first (P16).
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

from common import Row, result, row_of, table
from simulation.run import Policy, Setting, Simulation
from simulation.tally import Tally

from headrace import __version__

LIMITS = (8, 4, 2, 1, 0)
UNIT = "of the ideal"
TARGET = 0.95


def policies() -> list[Policy]:
    """Every row, the first being the one that the ratio is about."""
    return [
        *(_early(limit, missing) for missing in (1, 2) for limit in LIMITS),
        *(Policy(name="plain dropping", max_lag=limit) for limit in LIMITS),
        *(Policy(name="plain waiting", max_lag=limit, over_lag="wait") for limit in LIMITS),
        *(Policy(name="turn, mask", max_lag=limit, over_lag="mask", turn=True) for limit in LIMITS),
    ]


def _early(limit: int, missing: int) -> Policy:
    return Policy(name=f"early closing, {missing} missing", max_lag=limit, early_missing=missing, lag_restarts=2)


def row(policy: Policy, setting: Setting, tallies: Sequence[Tally]) -> Row:
    """One policy at one limit: the median over the seeds."""

    def median(of: Callable[[Tally], float]) -> float:
        return round(statistics.median(of(tally) for tally in tallies), 3)

    return row_of(
        f"{policy.name}, limit {policy.max_lag}",
        __version__,
        UNIT,
        [tally.useful / tally.span_s / setting.ideal for tally in tallies],
        limit=policy.max_lag,
        delivered=median(lambda tally: tally.trained / tally.span_s / setting.ideal),
        worst_lag=max(tally.worst_lag for tally in tallies),
        violations=sum(tally.violations for tally in tallies),
        discarded=median(lambda tally: tally.discarded_share),
        discarded_slot_s=median(lambda tally: tally.discarded_slot_share),
        long_tokens=median(lambda tally: tally.long_share),
        held=median(lambda tally: tally.held_s / tally.span_s),
        deciles=[
            round(statistics.median(shares), 2) for shares in zip(*(tally.deciles for tally in tallies), strict=True)
        ],
    )


def holds(rows: Sequence[Row]) -> dict[str, bool]:
    """The targets, by name."""
    found = {each.system: each for each in rows}
    eight, four = found["early closing, 1 missing, limit 8"], found["early closing, 1 missing, limit 4"]
    turn = found["turn, mask, limit 8"]

    def within(one: Row, least: float, **most: float) -> bool:
        return (one.figure or 0.0) >= least and all(_number(one, key) <= bound for key, bound in most.items())

    return {
        "no violations": all(_number(one, "violations") == 0 for one in rows),
        "limit 8, sticky": within(eight, TARGET, discarded=0.05, discarded_slot_s=0.13),
        "limit 8, turn": within(turn, 0.93) and _number(turn, "long_tokens") >= 0.5,
        "limit 4, sticky": within(four, 0.90, discarded=0.25),
    }


def _number(one: Row, key: str) -> float:
    value = one.extra[key]
    assert isinstance(value, int | float)
    return value


def main() -> None:
    """Simulate, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120, help="learner steps that count")
    parser.add_argument("--warm-up", type=int, default=40, help="learner steps before them")
    arguments = parser.parse_args()
    setting = Setting()
    rows = []
    for policy in policies():
        seeds = range(arguments.seeds)
        tallies = [Simulation(setting, policy, seed).run(arguments.steps, arguments.warm_up) for seed in seeds]
        rows.append(row(policy, setting, tallies))
        sys.stdout.write(table(rows[-1:]) + "\n")
        sys.stdout.flush()
    checks = holds(rows)
    ratio = rows[0].figure or 0.0
    sys.stdout.write(f"ideal {setting.ideal:.2f} episodes/s; targets met: {checks}\n")
    if arguments.json:
        sys.stdout.write(
            result(
                "async_bound", ratio, TARGET, all(checks.values()), rows, targets=checks, ideal_episodes_s=setting.ideal
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
