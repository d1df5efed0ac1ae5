"""Which kind of box a worker uses: the one asked for where it works, else a stronger one; never a weaker one."""

from pathlib import Path

from headrace.platform.config.sandbox import MODES, SandboxConfig
from headrace.platform.contracts import SandboxProvider
from headrace.platform.errors import ConfigError


def provider_for(config: SandboxConfig, state: Path) -> SandboxProvider:
    """Whoever makes boxes as configured, in the folder `state` of this node. Starts no box that stays.

    Raises:
        ConfigError: none of the kinds that are accepted works here; it says why not for each, and the fix.
    """
    reasons = []
    accepted = MODES[: MODES.index(config.mode) + 1]
    for mode in reversed(accepted):
        reason = _why_not(mode, state)
        if not reason:
            try:
                return _provider(mode, config, state)
            except ConfigError as error:
                reason = str(error)
        reasons.append(f"{mode}: {reason}")
    raise ConfigError(f"no sandbox of at least sandbox.mode={config.mode} works here. " + ". ".join(reasons))


def why_not(mode: str) -> str:
    """Why this host cannot run boxes of this kind now, with the fix; empty when it can.

    Raises:
        ConfigError: for a mode that does not exist.
    """
    return _why_not(mode, None)


def _why_not(mode: str, state: Path | None) -> str:
    # Each kind's libraries are loaded only where it is asked for.
    match mode:
        case "docker":
            from headrace.actors.sandboxes import docker

            return docker.why_not()
        case "bubblewrap":
            from headrace.actors.sandboxes import bwrap

            return bwrap.why_not(state)
        case "landlock":
            from headrace.actors.sandboxes import landlock

            return landlock.why_not()
        case "unsafe-process":
            from headrace.actors.sandboxes import process

            return process.why_not()
    raise ConfigError(f"sandbox.mode={mode}: expected one of {', '.join(MODES)}")


def _provider(mode: str, config: SandboxConfig, state: Path) -> SandboxProvider:
    match mode:
        case "docker":
            from headrace.actors.sandboxes.docker import DockerProvider

            return DockerProvider(config, state)
        case "bubblewrap":
            from headrace.actors.sandboxes.bubblewrap import BubblewrapProvider

            return BubblewrapProvider(config, state)
        case "landlock":
            from headrace.actors.sandboxes.landlock import LandlockProvider

            return LandlockProvider(config, state)
    from headrace.actors.sandboxes.process import ProcessProvider

    return ProcessProvider(config, state)
