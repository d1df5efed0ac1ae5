"""Checks and measures on one GPU what headrace does there, and writes benchmarks/results/gpu-DATE.json.

`python -m scripts.gpu_check [PART ...]` from the project's folder, or `make gpu-check`. Parts run one after the other,
each in a process of its own under its own deadline, all of them within eight minutes; one that fails, crashes or hangs
does not keep the others from running. Ends with 0 when every part holds or has nothing to check, with 1 when one does
not, with 2 where there is no GPU. `--rehearse` runs everything in small on the CPU and writes only where `--out` says.
"""

import argparse
import sys
from pathlib import Path

from .conductor import DEADLINES_S, conduct, no_gpu, say


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(DEADLINES_S)}; all unless named")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    parser.add_argument("--out", type=Path, help="where the figures are written")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in DEADLINES_S]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(DEADLINES_S)}")
    if arguments.inside:
        from .parts import run_here

        return run_here(arguments.parts[0], rehearse=arguments.rehearse)
    if not arguments.rehearse and (why := no_gpu()):
        say(why)
        return 2
    from .machine import machine  # it needs torch

    return conduct(arguments.parts or list(DEADLINES_S), machine(), rehearse=arguments.rehearse, out=arguments.out)


if __name__ == "__main__":
    sys.exit(main())
