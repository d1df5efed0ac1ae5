"""What a maximal policy lag of 0, 1, 2, 4 and 8 buys and costs on `lookup-slow`; see `headrace study credit`.

Ray runtime, worlds with latency. The figure of a row is the seconds until the mean over three steps first was 0.9 (the
length of the run where it was not, which the row says); `steps` are the learner steps until then. The ratio is the time
with limit 0 over that with limit 4: what asynchrony buys; it holds when that is more than 1 and every run reached 0.9.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from common import result, row_of, table

from headrace import __version__
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.study import LAGS, run_study

STEPS = 60


def main() -> None:
    """Run the study, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the study's folder; a new one under the system's temporary folder")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="headrace-study-"))
    seeds, changes = range(arguments.seeds), [f"learner.steps={STEPS}"]
    study = run_study("lag", "lookup-slow", recipes_dir(), LAGS, seeds=seeds, changes=changes, out=out)
    rows, medians = [], {}
    for condition in LAGS:
        runs = study.of(condition)
        seconds = [run.seconds_to_goal or run.curve[-1].seconds for run in runs]
        medians[condition] = statistics.median(seconds)
        extra = {"steps": [run.steps_to_goal for run in runs], "after": [run.after for run in runs]}
        rows.append(row_of(condition, __version__, "s", seconds, **extra))
    sys.stdout.write(table(rows) + f"\nfigure: {out / 'lag.png'}\n")
    if arguments.json:
        gain, reached = medians["lag 0"] / medians["lag 4"], all(run.steps_to_goal for run in study.runs)
        sys.stdout.write(result("lag_limits", gain, 1.0, gain > 1.0 and reached, rows) + "\n")


if __name__ == "__main__":
    main()
