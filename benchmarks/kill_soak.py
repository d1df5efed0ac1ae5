"""Kills the processes of running `lookup-slow` recipes, hundreds of times, and counts what was lost or trained twice.

    python benchmarks/kill_soak.py [--kills 24] [--groups 3] [--seed 0] [--json]

Each kill is a SIGKILL of the learner, the rollout worker, the engine replica, the ledger's server, of whoever passes a
failpoint next, or of the whole process group, which is then resumed; drawn from the seed, so that every kind has its
turn. Runs follow one another until the kills are spent. Rows: by kind, the seconds from a kill to the next learner step
(a killed group has to start a Ray again). `ratio` is the number of slots trained twice; its target is 0. `holds` also
needs that nothing is lost, that the equation holds in every run, and that every run ends at 0.9 or more.
"""

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common import result, row_of, table

from headrace import __version__
from headrace.platform.testing.kills.plan import kill_plan
from headrace.platform.testing.kills.soak import Outcome, SoakRun, soak

HEADRACE = [sys.executable, "-c", "from headrace.deploy.cli import main; main()"]
STEPS = 60
KILLS_PER_RUN = 12
QUIET_STEPS = 10
"""Learner steps at the end of a run in which nobody is killed: the last kill needs a step to recover by."""
RECIPE = [
    "lookup-slow",
    f"learner.steps={STEPS}",
    "learner.lr=1e-3",
    "learner.checkpoint_every=3",
    "runtime.max_restarts=20",
    "eval.tasks=256",
]
ENOUGH = 0.9


def outcomes(kills: int, groups: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Runs one after the other, until `kills` kills have been done."""
    plan = kill_plan(seed, kills, groups=groups)
    number = 0
    while plan:
        run = SoakRun(folder / f"run-{number}", HEADRACE, [*RECIPE, f"seed={seed + number}"])
        outcome = soak(run, plan[:KILLS_PER_RUN], STEPS - QUIET_STEPS)
        plan = plan[len(outcome.killed) :]
        number += 1
        yield outcome


def main() -> int:
    """Kill, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--groups", type=int, default=3, help="how many of them are of the whole process group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    recoveries: dict[str, list[float]] = defaultdict(list)
    twice = lost = runs = 0
    worst, all_hold = math.inf, True
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        for outcome in outcomes(options.kills, options.groups, options.seed, Path(folder)):
            for killed in outcome.killed:
                recoveries[killed.kind].append(killed.recovery_s)
            twice += len(outcome.audit.twice)
            lost += abs(outcome.audit.lost)
            runs += 1
            worst = min(worst, outcome.summary["success_after"])
            all_hold = all_hold and outcome.holds
    rows = [
        row_of(kind, __version__, "s to the next learner step", seconds, kills=len(seconds))
        for kind, seconds in sorted(recoveries.items())
    ]
    holds = all_hold and not twice and not lost and worst >= ENOUGH
    if not options.json:
        sys.stdout.write(table(rows) + "\n")
    kills = sum(map(len, recoveries.values()))
    extra = {"kills": kills, "runs": runs, "duplicates_trained": twice, "lost": lost, "success_after_worst": worst}
    sys.stdout.write(result("kill_soak", float(twice), 0.0, holds, rows, **extra) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
