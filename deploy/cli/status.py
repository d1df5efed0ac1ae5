"""`headrace status`: what each part of a run is doing, what it waits for, and since when."""

from typing import Any

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json


def status(run: RunName, runs_dir: RunsDir = "runs", as_json: Json = False) -> None:
    """Say what each part of a run is doing, what it waits for and since when.

    Works from another terminal while the run goes on, and afterwards: it reads the run root alone.
    """
    from headrace.deploy.status import run_status
    from headrace.platform.store.run_root import RunRoot

    facts = run_status(RunRoot.find(runs_dir, run))
    if as_json:
        answer_json(facts)
    else:
        typer.echo(_shown(facts), nl=False)


def _shown(facts: dict[str, Any]) -> str:
    lines = [f"{facts['run']}: {facts['state']}"]
    if facts["step"] is not None:
        lines[0] += f", learner step {facts['step']} of {facts['steps']}, version {facts['version']}"
    width = max((len(part["part"]) for part in facts["parts"]), default=0)
    for part in facts["parts"]:
        doing = f"waiting for {part['waiting_for']}" if part["waiting_for"] else part["state"]
        gone = f"; not heard of for {part['silent_s']:.0f} s: gone or stuck" if part["silent"] else ""
        lines.append(f"  {part['part']:<{width}}  {doing}, for {part['for_s']:.0f} s{gone}")
        for told in ("ledger", "hosts"):
            if text := part["detail"].get(told):
                lines.append(f"  {'':<{width}}  {text}")
    if facts["queue"]:
        lines.append("  queue: " + ", ".join(f"{count} groups {state}" for state, count in facts["queue"].items()))
    lines += [f"  {event['shown']}" for event in facts["events"]]
    if facts["state"] in ("killed", "failed", "interrupted"):
        lines.append(f"Go on with it:  headrace train --resume {facts['run']}")
    return "\n".join(lines) + "\n"
