"""`headrace pool`: the replicas of a run that goes on, and more or fewer of them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.deploy.pool_control import PoolReplica, PoolState
    from headrace.platform.store.run_root import RunRoot

pool = typer.Typer(no_args_is_help=True, help="The inference replicas of a run that goes on.")

Count = Annotated[int, typer.Argument(help="How many replicas there should be.", min=1, show_default=False)]
Deadline = Annotated[float, typer.Option("--deadline", help="Seconds to wait; the run goes on with it afterwards.")]


@pool.command()
def show(run: RunName, runs_dir: RunsDir = "runs", as_json: Json = False) -> None:
    """Say which versions each replica holds, how many episodes use it, and whether it drains."""
    from headrace.deploy.pool_control import PoolControl

    root = _running(runs_dir, run)
    state = PoolControl(root.url).state()
    if as_json:
        answer_json({"run": root.name, "replicas": [_facts(replica) for replica in state.replicas]})
    else:
        typer.echo(_shown(root.name, state), nl=False)


@pool.command()
def scale(
    run: RunName, replicas: Count, runs_dir: RunsDir = "runs", deadline: Deadline = 300.0, as_json: Json = False
) -> None:
    """Start more replicas, or let some leave, while the run goes on.

    One that joins gets its first episode when it holds a committed version. One that leaves takes no new episode and
    ends when those that use it have ended. Exit code 1: it could not be done, and the message says why.
    """
    from headrace.deploy.pool_control import PoolControl

    root = _running(runs_dir, run)
    control = PoolControl(root.url)
    control.state()
    state = control.wait(control.ask(replicas), deadline, lambda: _state_of(root) == "running")
    if as_json:
        answer_json({"run": root.name, "replicas": len(state.replicas), "was": state.was})
    else:
        typer.echo(f"{root.name}: {len(state.replicas)} replicas, {state.was} before")


def _running(runs_dir: str, run: str) -> "RunRoot":
    from headrace.platform.errors import RunFailed
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    state = _state_of(root)
    if state != "running":
        raise RunFailed(f"the run {root.name} is not running (it is {state}), so it has no replicas")
    return root


def _state_of(root: "RunRoot") -> str:
    from headrace.deploy.status import run_status

    return str(run_status(root)["state"])


def _facts(replica: "PoolReplica") -> dict[str, Any]:
    return {
        "name": replica.name,
        "versions": list(replica.versions),
        "sessions": replica.sessions,
        "running": replica.running,
        "draining": replica.is_draining,
        "held": list(replica.held),
    }


def _shown(run: str, state: "PoolState") -> str:
    lines = [f"{run}: {len(state.replicas)} replicas"]
    for replica in state.replicas:
        versions = f"versions {', '.join(map(str, replica.versions))}" if replica.versions else "no version yet"
        held = f", held to {', '.join(map(str, replica.held))}" if replica.held else ""
        draining = ", draining" if replica.is_draining else ""
        lines.append(
            f"  {replica.name}  {versions}; {replica.sessions} sessions, {replica.running} requests{held}{draining}"
        )
    return "\n".join(lines) + "\n"
