"""`headrace replay`: play a stored episode again and compare every hash."""

import asyncio
from typing import Annotated

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json


def replay(
    run: RunName,
    episode: Annotated[str, typer.Argument(help="An episode id, or any unique prefix of it.", show_default=False)],
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Run a stored episode again in its environment and report the first step whose hash differs, or that none does.

    The recorded actions are given to a fresh environment under the recorded seed. Exit code 1 means that it diverged.
    """
    from headrace.actors.replay import replay_episode
    from headrace.actors.worlds import Worlds
    from headrace.platform.config.load import config_from_text
    from headrace.platform.errors import NotFound
    from headrace.platform.store.episodes import EpisodeStore
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    config = config_from_text(root.read_config(), [], f"{root.name}/config.yaml")
    stored = EpisodeStore(root.url).find(episode)
    named = [each for each in config.environments if each.known_as == stored.task.environment]
    if not named:
        raise NotFound(f"{stored.episode_id} was played in {stored.task.environment!r}, not in the run's recipe")
    worlds = Worlds(config.environments, "train", config.seed)
    report = asyncio.run(replay_episode(stored, worlds.async_environment(named[0])))
    if as_json:
        answer_json(
            {
                "episode_id": report.episode_id,
                "steps": report.steps,
                "equal": report.equal,
                "first_divergence": report.first_divergence,
                "differences": [
                    {"step": d.step, "what": d.what, "recorded": d.recorded.canonical, "replayed": d.replayed.canonical}
                    for d in report.differences
                ],
            }
        )
    elif report.equal:
        typer.echo(f"{report.episode_id}: {report.steps} steps, no hash differs")
        for difference in report.differences:
            typer.echo(f"  step {difference.step}: only the raw {difference.what} hash differs")
    else:
        typer.echo(f"{report.episode_id}: first divergence at step {report.first_divergence} of {report.steps}")
        for difference in report.differences:
            typer.echo(
                f"  step {difference.step}: {difference.what}: recorded {difference.recorded.canonical[:16]},"
                f" replayed {difference.replayed.canonical[:16]}"
            )
    if not report.equal:
        raise typer.Exit(1)
