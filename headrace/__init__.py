"""headrace: distributed asynchronous rollout and training for language-model agents.

The public API is the names in `__all__`; they load on first use, so that `import headrace` stays cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Episode": "headrace.platform.records",
    "Turn": "headrace.platform.records",
    "Task": "headrace.platform.records",
    "Message": "headrace.platform.records",
    "Observation": "headrace.platform.records",
    "StepResult": "headrace.platform.records",
    "RewardComponent": "headrace.platform.records",
    "RewardKind": "headrace.platform.records",
    "Status": "headrace.platform.records",
    "ToolSpec": "headrace.platform.records",
    "Environment": "headrace.platform.contracts",
    "TaskSource": "headrace.platform.contracts",
    "Scorer": "headrace.platform.contracts",
    "Renderer": "headrace.platform.contracts",
    "HeadraceError": "headrace.platform.errors",
    "EnvironmentFault": "headrace.platform.errors",
    "ConfigError": "headrace.platform.errors",
    "Role": "headrace.platform.records",
    "ToolCall": "headrace.platform.records",
    "hash_value": "headrace.platform.hashing",
    "SingleTurn": "headrace.actors.environments.doors.single_turn",
    "ToolUse": "headrace.actors.environments.doors.tool_use",
    "Session": "headrace.actors.environments.doors.session",
    "tool": "headrace.actors.environments.doors.declared",
    "ToolError": "headrace.actors.environments.doors.session",
    "ReplayedEnvironment": "headrace.actors.environments.base",
    "SandboxedEnvironment": "headrace.actors.environments.sandboxed",
    "EnvironmentKind": "headrace.actors.environments.kind",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
