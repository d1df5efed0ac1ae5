"""How fast each algorithm learns `lookup` from the same weights: `headrace study credit`, without the lag limits.

Every algorithm (GRPO, RLOO, PPO with turn-level GAE, REINFORCE) with seeds 0 to 2, in process, from one cached
checkpoint after the supervised stages. The figure of a row is the success of the final evaluation, its spread that over
the seeds; `steps` are the learner steps after which the mean over three steps first was 0.9. The ratio is the lowest
final success of all runs; it holds when that reaches 0.9. The picture lies in the study's folder.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import result, row_of, table

from headrace import __version__
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.study import CREDIT, GOAL, run_study

STEPS = 40


def main() -> None:
    """Run the study, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the study's folder; a new one under the system's temporary folder")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="headrace-study-"))
    changes = [f"learner.steps={STEPS}", "runtime.kind=inprocess"]
    study = run_study("credit", "lookup", recipes_dir(), CREDIT, seeds=range(arguments.seeds), changes=changes, out=out)
    rows = []
    for condition in CREDIT:
        runs = study.of(condition)
        after, steps = [run.after for run in runs], [run.steps_to_goal for run in runs]
        rows.append(row_of(condition, __version__, "success", after, steps=steps, before=[run.before for run in runs]))
    sys.stdout.write(table(rows) + f"\nfigure: {out / 'credit.png'}\n")
    if arguments.json:
        worst = min(run.after for run in study.runs)
        sys.stdout.write(result("learning_curves", worst, GOAL, worst >= GOAL, rows) + "\n")


if __name__ == "__main__":
    main()
