"""Runs every benchmark and writes what they found to benchmarks/results/DATE.json, with the machine they ran on.

`python scripts/evidence.py [NAME...]`: with names, only these are run, and their results replace those of the same day.

Each benchmarks/*.py that can be run ends, under `--json`, with one line that is a JSON object: name, ratio, target,
holds, rows. A benchmark that fails, or whose targets do not hold, is recorded all the same and makes the exit status 1.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
DEADLINE_S = 1800


def measure(script: Path) -> dict[str, Any]:
    """What one benchmark reports; a failure is a result with `holds` false and an `error`."""
    failed = {"name": script.stem, "holds": False}
    try:
        done = subprocess.run(
            [sys.executable, str(script), "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return failed | {"error": f"no result after {DEADLINE_S} s"}
    lines = done.stdout.strip().splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1])
        return result | {"name": result["name"], "holds": bool(result["holds"])}
    except (IndexError, KeyError, TypeError, ValueError):
        return failed | {"error": f"exit status {done.returncode}, and the last line of output is no result"}


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    model = ""
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def earlier_results(out: Path) -> dict[str, dict[str, Any]]:
    """What was measured on the same day, by name."""
    if not out.exists():
        return {}
    return {result["name"]: result for result in json.loads(out.read_text(encoding="utf-8"))["benchmarks"]}


def main(names: Sequence[str]) -> int:
    """Run all or those named, print a line for each, write the file."""
    known = {path.stem: path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    if not known or (unknown := set(names) - set(known)):
        missing = ", ".join(sorted(unknown)) if known else "benchmark"
        sys.stderr.write(f"benchmarks/ has no {missing}; it has {', '.join(sorted(known)) or 'none'}\n")
        return 1
    results = []
    for script in (known[name] for name in sorted(names or known)):
        result = measure(script)
        results.append(result)
        verdict = "holds" if result["holds"] else "does not hold"
        figures = f"ratio {result.get('ratio')}, target {result.get('target')}"
        sys.stdout.write(f"{result['name']}: {result.get('error') or figures}: {verdict}\n")
        sys.stdout.flush()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = BENCHMARKS / "results" / f"{date}.json"
    out.parent.mkdir(exist_ok=True)
    all_results = (earlier_results(out) if names else {}) | {result["name"]: result for result in results}
    content = {"date": date, "machine": machine(), "benchmarks": [all_results[name] for name in sorted(all_results)]}
    out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {out.relative_to(ROOT)}\n")
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
