"""`headrace env serve`: host an environment for the rollout workers of other machines.

Needs no queue and no store, and loads neither. SIGTERM drains: nothing new begins, what is at play may end within the
grace period, the rest is cancelled for a new attempt elsewhere. A second one cancels at once.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.cli.options import Json, SandboxText, answer_json, json_object, sandbox_config

if TYPE_CHECKING:
    from headrace.actors.remote.host import EnvironmentHost, HostSettings
    from headrace.actors.remote.offer import Offer

_INTERRUPTED = 130
_CLOSE_S = 15.0


def serve(
    target: Annotated[
        str, typer.Argument(help="./file.py:Name, package.module:Name, or a registered name.", show_default=False)
    ],
    args: Annotated[str, typer.Option(help="The environment's args, as a JSON object.")] = "{}",
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    token: Annotated[
        str, typer.Option(help="What clients must show, as '${env:NAME}' or '${file:PATH}', or a file that holds it.")
    ] = "",
    capacity: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 64,
    idle: Annotated[float, typer.Option(min=0.1, help="Seconds that a client may say nothing.")] = 300.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that sessions may go on after SIGTERM.")] = 30.0,
    call: Annotated[float, typer.Option(min=0.1, help="Seconds for one call of a client that names none.")] = 300.0,
    sandbox: SandboxText = "",
    split: Annotated[str, typer.Option(help="Whose tasks a client plays that names only a number.")] = "train",
    seed: Annotated[int, typer.Option(help="The seed of these tasks.")] = 0,
    registry: Annotated[
        str, typer.Option(help="A JSON file of addresses to be listed in while it takes sessions.")
    ] = "",
    advertise: Annotated[str, typer.Option(help="The name or address by which others reach this machine.")] = "",
    as_json: Json = False,
) -> None:
    """Host an environment over a WebSocket, for the pools of training runs and for OpenEnv clients.

    Prints a line with its address when it is ready, and another after it was drained. Try: headrace env serve lookup
    """
    from headrace.actors.remote.host import HostSettings
    from headrace.actors.remote.host_session import SessionLimits
    from headrace.actors.remote.offer import Offer
    from headrace.actors.remote.registry_file import check_registry

    settings = HostSettings(
        host=host,
        port=port,
        token=token_behind(token),
        capacity=capacity,
        limits=SessionLimits(idle_s=idle, call_s=call),
        image_digest=os.environ.get("HEADRACE_IMAGE_DIGEST", ""),
    )
    settings.check()
    offer = Offer(target, json_object("--args", args), sandbox_config(sandbox), split, seed)
    listed = Path(registry).resolve() if registry else None
    if listed is not None:
        with _registry_errors(listed):
            check_registry(listed)
    code = asyncio.run(_host(offer, settings, listed, advertise, grace, as_json))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of environments that never answer would keep the process alive


async def _host(
    offer: "Offer", settings: "HostSettings", registry: Path | None, advertise: str, grace_s: float, as_json: bool
) -> int:
    """From ready to drained; the exit code."""
    from headrace.actors.remote.host import EnvironmentHost
    from headrace.actors.remote.registry_file import join_registry, leave_registry
    from headrace.platform.errors import ConfigError

    stop, hurry, signals = asyncio.Event(), asyncio.Event(), list[int]()

    def asked(number: int) -> None:
        (hurry if stop.is_set() else stop).set()
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked, number)
    host = EnvironmentHost(offer, settings)
    try:
        await host.start()
    except OSError as error:
        raise ConfigError(f"cannot listen at {settings.host} port {settings.port}: {error.strerror or error}") from None
    address = _address(settings.host, host.port, advertise)
    try:
        if registry is not None:
            with _registry_errors(registry):
                await asyncio.to_thread(join_registry, registry, address)
        _say_ready(address, offer, settings, as_json)
        await stop.wait()
    finally:
        host.begin_drain()
        if registry is not None:
            try:
                with _registry_errors(registry):
                    await asyncio.to_thread(leave_registry, registry, address)
            except ConfigError as error:  # its clients find out by themselves
                typer.echo(f"{address} stays in the registry: {error}", err=True)
    await _drained(host, grace_s, hurry)
    if as_json:
        answer_json({"address": address, "sessions": host.played, "cancelled": host.cancelled})
    else:
        typer.echo(f"drained: {host.played} sessions were played, {host.cancelled} of them cancelled")
    return _INTERRUPTED if signals[0] == signal.SIGINT else 0


@contextlib.contextmanager
def _registry_errors(registry: Path) -> Iterator[None]:
    """Says which file could not be read or written. Raises ConfigError."""
    from headrace.platform.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(f"--registry {registry} cannot be written: {error.strerror or error}") from None


async def _drained(host: "EnvironmentHost", grace_s: float, hurry: asyncio.Event) -> None:
    draining = asyncio.ensure_future(host.drain(grace_s, hurry))
    done, _ = await asyncio.wait({draining}, timeout=grace_s + _CLOSE_S)
    for each in done:
        each.result()


def _say_ready(address: str, offer: "Offer", settings: "HostSettings", as_json: bool) -> None:
    if as_json:
        ready = {"address": address, "environment": offer.name, "version": offer.version, "pid": os.getpid()}
        answer_json({**ready, "capacity": settings.capacity})
    else:
        typer.echo(f"{offer.name} {offer.version} at {address}, {settings.capacity} sessions at once")


def _address(host: str, port: int, advertise: str) -> str:
    """How others reach this host."""
    name = advertise or (socket.getfqdn() if host in ("0.0.0.0", "::") else host)
    return f"ws://[{name}]:{port}" if ":" in name else f"ws://{name}:{port}"


def token_behind(text: str) -> str:
    """The token behind a reference or in a file; a literal one would be in every list of processes."""
    from headrace.platform.config.secret_references import resolve
    from headrace.platform.errors import ConfigError

    if not text:
        return ""
    if text.startswith("${") and text.endswith("}"):
        return resolve(text)
    if Path(text).is_file():
        return resolve(f"${{file:{text}}}")
    raise ConfigError("--token must be a reference such as '${env:HEADRACE_TOKEN}', or a file that holds the token")
