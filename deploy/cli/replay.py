"""`headrace replay`: play stored episodes again and compare every hash, or branch a new one from a step."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.actors.replay import ReplayReport
    from headrace.deploy.replaying import Tally
    from headrace.platform.store.run_root import RunRoot

_LISTED = 5


def replay(
    run: RunName,
    episodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EPISODE...]",
            help="Episode ids, or any unique prefixes of them. Default: all that are stored.",
            show_default=False,
        ),
    ] = None,
    branch: Annotated[
        int | None, typer.Option(metavar="STEP", help="Play a new episode from after this step of one; 0 is the reset.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="Who plays the branch: a number, `latest` or `best`. Default: latest.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Replay at most so many.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask services outside the world for what was not recorded.")
    ] = False,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Run stored episodes again in their environments and say where each first differs, or that none does.

    The recorded actions are given to a fresh environment under the recorded seed; every canonical hash is compared, and
    what the environment itself rewarded.
    With --branch, the run's policy goes on from that step, and the new episode is stored with purpose `replay`. Exit
    code 1 means that an episode diverged, or could not be compared.
    """
    from headrace.platform.errors import ConfigError
    from headrace.platform.store.run_root import RunRoot

    root, names = RunRoot.find(runs_dir, run), episodes or []
    if branch is not None:
        if len(names) != 1 or limit is not None or live:
            raise ConfigError("--branch takes one episode, and neither --limit nor --live")
        _branch(root, names[0], branch, version or "latest", as_json)
        return
    if version:
        raise ConfigError("--version says who plays a branch; give --branch STEP too")
    tally = _replayed(root, names, limit, live, alone=len(names) == 1)
    if len(names) == 1:
        _tell_one(tally, as_json)
    else:
        _tell_all(root.name, tally, as_json)
    if not tally.equal:
        raise typer.Exit(1)


def _replayed(root: "RunRoot", names: list[str], limit: int | None, live: bool, alone: bool) -> "Tally":
    from headrace.deploy.replaying import chosen_episodes, replay_all, run_config
    from headrace.platform.errors import NotFound, RunFailed
    from headrace.platform.store.tables import RewardTable

    config = run_config(root)
    tally = asyncio.run(
        replay_all(
            chosen_episodes(root, names, limit),
            config.environments,
            config.seed,
            live=live,
            rewards=RewardTable(root.url).by_episode(),
            keep_all=alone,
            news=None if alone else _tell_progress,
        )
    )
    if tally.stopped:
        compared = tally.episodes - tally.not_compared
        raise RunFailed(f"the replay was given up after {compared} compared episodes: {tally.stopped}")
    if alone and tally.refused:  # of one, the refusal is the answer
        raise NotFound(next(iter(tally.refused.values())))
    return tally


def _tell_progress(tally: "Tally") -> None:
    told = f"{tally.episodes} episodes replayed, {tally.diverged} diverged, {tally.not_compared} not compared"
    typer.echo(told, err=True)


def _tell_one(tally: "Tally", as_json: bool) -> None:
    from headrace.deploy.replaying import report_facts

    (report,) = tally.reports
    if as_json:
        answer_json(report_facts(report))
    else:
        _print(report)


def _tell_all(run: str, tally: "Tally", as_json: bool) -> None:
    from headrace.deploy.replaying import tally_facts

    if as_json:
        answer_json(tally_facts(run, tally))
        return
    for report in tally.reports[:_LISTED]:
        _print(report)
    refused, interrupted = list(tally.refused.items())[:_LISTED], list(tally.interrupted.items())[:_LISTED]
    for episode_id, reason in refused:
        typer.echo(f"{episode_id}: not compared: {reason}")
    for episode_id, reason in interrupted:
        typer.echo(f"{episode_id}: not compared, as it was interrupted twice: {reason}")
    shown = len(tally.reports[:_LISTED]) + len(refused) + len(interrupted)
    left = tally.diverged + tally.not_compared - shown
    if left:
        typer.echo(f"... and {left} more; --json lists them, or name the episodes")
    equal = tally.episodes - tally.diverged - tally.not_compared
    notes = [
        f"{tally.diverged} diverged" if tally.diverged else "",
        f"{tally.refusals} not compared" if tally.refusals else "",
        f"{tally.interruptions} interrupted, which says nothing of them" if tally.interruptions else "",
        f"{tally.from_record} ended from the record" if tally.from_record else "",
        f"{tally.accidental} differ in raw hashes only" if tally.accidental else "",
        f"fidelity gap {tally.fidelity_gap}: so many answers came from the cassette" if tally.fidelity_gap else "",
        f"{tally.live_calls} asked for live" if tally.live_calls else "",
    ]
    told = "; ".join(note for note in notes if note)
    typer.echo(
        f"{run}: {equal} of {tally.episodes} episodes replay equal ({tally.seconds:.1f} s)" + f"; {told}" * bool(told)
    )


def _print(report: "ReplayReport") -> None:
    """A report for people."""
    if report.equal:
        typer.echo(f"{report.episode_id}: {report.steps} steps, no hash differs")
    elif report.interrupted:
        typer.echo(f"{report.episode_id}: not compared, as it was interrupted twice: {report.interrupted}")
    else:
        typer.echo(f"{report.episode_id}: first divergence at step {report.first_divergence} of {report.steps}")
    for found in report.differences:
        if found.is_divergence:
            hashes = f"recorded {found.recorded.canonical[:16] or '-'}, replayed {found.replayed.canonical[:16] or '-'}"
            typer.echo(f"  step {found.step}: {found.what}: {hashes}")
        else:
            typer.echo(f"  step {found.step}: only the raw {found.what} hash differs")
        for line in found.diff:
            typer.echo(f"    {line}")
    if report.from_record:
        typer.echo(f"  ended from the record: {report.from_record}")
    if report.fidelity_gap:
        steps = ", ".join(map(str, report.fidelity_steps))
        typer.echo(f"  fidelity gap {report.fidelity_gap}: answers from the cassette at steps {steps}")
    if report.live_calls:
        typer.echo(f"  {report.live_calls} calls were live")


def _branch(root: "RunRoot", name: str, step: int, version: str, as_json: bool) -> None:
    from headrace.deploy.branching import branch_episode
    from headrace.platform.store.episodes import EpisodeStore

    parent = EpisodeStore(root.url).find(name)
    played = asyncio.run(branch_episode(root, parent, step, version))
    episode = played.episode
    if as_json:
        answer_json(
            {
                "episode_id": episode.episode_id,
                "parent_episode": episode.parent_episode,
                "branch_step": episode.branch_step,
                "version": episode.version.number,
                "turns": len(episode.views),
                "status": episode.status,
                "stop_reason": episode.stop_reason,
                "score": played.score,
                "fault": episode.fault,
            }
        )
        return
    score = "no score" if played.score is None else f"score {played.score:g}"
    typer.echo(
        f"{episode.episode_id}: branched off {episode.parent_episode} after step {step}, played on by version"
        f" {episode.version.number}: {episode.status}, {len(episode.views)} turns, {score}\n"
        f"Look at it:  headrace inspect {root.name} {episode.episode_id}"
    )
