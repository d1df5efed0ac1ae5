"""Which kinds of boxes protect, and how tests make them. The kernel is asked for Landlock here, not by the product."""

import ctypes
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import SandboxProvider

CLASSES = {
    "docker": ("docker", "DockerProvider"),
    "bubblewrap": ("bubblewrap", "BubblewrapProvider"),
    "landlock": ("landlock", "LandlockProvider"),
    "unsafe-process": ("process", "ProcessProvider"),
}
LANDLOCK_NEEDED = 6
"""The oldest ABI with rules for signals and abstract sockets."""
_CREATE_RULESET, _ASK_VERSION = 444, 1

Make = Callable[..., SandboxProvider]


def landlock_abi() -> int:
    """The kernel's Landlock ABI; below 1 there is none."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _ASK_VERSION))


PROTECTING = ("docker", "bubblewrap", *(["landlock"] if landlock_abi() >= LANDLOCK_NEEDED else []))
"""The kinds that must hold against an escape, on this kernel."""


def provider(mode: str, state: Path, **settings: Any) -> SandboxProvider:
    """The provider of one mode, without a choice of another."""
    module, name = CLASSES[mode]
    if mode == "docker":
        settings.setdefault("image", "headrace-test")
    config = SandboxConfig.model_validate({"mode": mode, **settings})
    made: SandboxProvider = getattr(import_module(f"headrace.actors.sandboxes.{module}"), name)(config, state)
    return made
