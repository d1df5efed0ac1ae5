"""`headrace serve`: a stored version behind the public door, for any program that speaks OpenAI's API.

SIGTERM drains: nothing new begins, requests under way may end within the grace period.
"""

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json
from headrace.deploy.cli.serve import token_behind

if TYPE_CHECKING:
    from headrace.platform.config import RunConfig
    from headrace.platform.store.run_root import RunRoot

_INTERRUPTED = 130


def serve_run(
    run: RunName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as 'serving.threads=4'.", show_default=False)
    ] = None,
    version: Annotated[str, typer.Option(help="A number, latest, or best.")] = "latest",
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str,
        typer.Option(
            help="What clients must show: '${env:NAME}', '${file:PATH}', a file that holds it, or 'new' for one that is"
            " made and printed."
        ),
    ] = "",
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that requests may go on after SIGTERM.")] = 30.0,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Serve a version of a run over OpenAI's API: chat and text completions, streams, tools.

    Prints a line with its address when it is ready. Try: headrace serve RUN --version best
    """
    import secrets

    from headrace.deploy.serving_door import check_reach
    from headrace.platform.config.load import config_from_text
    from headrace.platform.store.run_root import RunRoot

    shown = secrets.token_urlsafe(24) if token == "new" else ""
    secret = shown or token_behind(token)
    check_reach(host, secret)
    root = RunRoot.find(runs_dir, run)
    config = config_from_text(root.read_config(), name=f"{root.name}/config.yaml", overrides=list(overrides or ()))
    code = asyncio.run(_serve(root, config, version, host, port, secret, shown, grace, as_json))
    raise typer.Exit(code)


async def _serve(
    root: "RunRoot",
    config: "RunConfig",
    version: str,
    host: str,
    port: int,
    token: str,
    shown: str,
    grace_s: float,
    as_json: bool,
) -> int:
    """From ready to drained; the exit code."""
    from headrace.deploy.serving_door import PublicDoor, stored_conversations

    stop, signals = asyncio.Event(), list[int]()

    def asked(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked, number)
    async with stored_conversations(root, version, config) as conversations:
        door = PublicDoor(conversations, host=host, port=port, token=token, grace_s=grace_s)
        await door.start()
        newest = conversations.state().newest
        if as_json:
            answer_json({"address": f"{door.url}/v1", "run": root.name, "version": newest, "pid": os.getpid()})
        else:
            typer.echo(f"{root.name} version {newest} at {door.url}/v1")
        if shown:
            typer.echo(f"token: {shown}", err=True)
        await stop.wait()
        conversations.begin_drain()
        await door.close()
    typer.echo("drained", err=as_json)
    return _INTERRUPTED if signals[0] == signal.SIGINT else 0
