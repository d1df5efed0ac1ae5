import pytest

import headrace

PUBLIC = [
    "__version__",
    "Episode",
    "Turn",
    "Task",
    "Message",
    "Observation",
    "StepResult",
    "RewardComponent",
    "RewardKind",
    "Status",
    "ToolSpec",
    "Environment",
    "TaskSource",
    "Scorer",
    "Renderer",
    "HeadraceError",
    "EnvironmentFault",
    "ConfigError",
    "Role",
    "ToolCall",
    "hash_value",
    "SingleTurn",
    "ToolUse",
    "Session",
    "tool",
    "ToolError",
    "ReplayedEnvironment",
    "SandboxedEnvironment",
    "EnvironmentKind",
]


def test_the_public_names_are_these() -> None:
    assert headrace.__all__ == PUBLIC, "a change of the public API belongs into CHANGELOG.md"


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_loads_and_has_a_docstring(name: str) -> None:
    value = getattr(headrace, name)
    assert name == "__version__" or (value.__name__ == name and value.__doc__)


def test_dir_lists_them_and_others_are_refused() -> None:
    assert dir(headrace) == sorted(PUBLIC)
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'Episodes'"):
        headrace.Episodes  # noqa: B018 - the access is what is tested
