"""The third door: a class that implements the whole `Environment` contract.

The recipe's `args` are divided by name between its constructor and, where it has one, its static or class method
`tasks(split, seed, **args)`, which returns a `TaskSource`, or rows or Tasks of that split as a list or from a generator
function (see `class_tasks`). What the class lacks is said when it is loaded.
"""

import inspect
from collections.abc import Iterable
from typing import Any, cast

from headrace.actors.environments.arguments import NO_PARAMETERS, parameters_of
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.kind import EnvironmentKind, Origin
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.frames import defined_at, described
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError, EnvironmentFault, HeadraceError

_CONTRACT = {
    "tools": "tools()",
    "reset": "reset(task, seed)",
    "step": "step(message, key)",
    "snapshot": "snapshot()",
    "restore": "restore(snapshot_id)",
    "clone": "clone()",
    "close": "close()",
}
_REPLAYED = {"tools": "tools()", "_reset": "_reset(task, seed)", "_step": "_step(message)"}
_ATTRIBUTES = ("name", "version")
_TASKS = "tasks(split, seed, **args)"


def class_kind(cls: Any, origin: Origin) -> EnvironmentKind:
    """The kind of an environment class.

    Raises:
        ConfigError: lists the methods and attributes that it lacks or that take other arguments; names file and line.
    """
    name = origin.target.rpartition(":")[2]
    _check_contract(cls)
    constructor = NO_PARAMETERS if cls.__init__ is object.__init__ else parameters_of(cls.__init__, skip=1)
    has_tasks = getattr(cls, "tasks", None) is not None
    of_tasks = parameters_of(cls.tasks, skip=2) if has_tasks else NO_PARAMETERS

    def build(args: dict[str, Any]) -> Environment:
        taken = constructor.taken(args, of_tasks, name)
        try:
            environment = cls(**taken)
        except HeadraceError:
            raise
        except (Exception, SystemExit) as error:  # foreign code: the message names its file and line
            transient = isinstance(error, ConnectionError | TimeoutError)
            raise EnvironmentFault(described(error), transient) from error
        if missing := [each for each in _ATTRIBUTES if not isinstance(getattr(environment, each, None), str)]:
            raise ConfigError(f"{defined_at(cls)}: {cls.__name__} has no text as {' and '.join(missing)}")
        built: Environment = environment
        return built

    def tasks(split: str, seed: int, args: dict[str, Any]) -> TaskSource:
        from headrace.actors.environments.doors.class_tasks import class_tasks

        return class_tasks(cls, split, seed, of_tasks.taken(args, constructor, name), origin)

    def build_boxed(args: dict[str, Any]) -> SandboxedEnvironment:
        return cast(SandboxedEnvironment, build(args))

    return EnvironmentKind(
        environment=build,
        sandboxed=build_boxed if issubclass(cls, SandboxedEnvironment) else None,
        tasks=tasks if has_tasks else None,
        environment_args=None if constructor.takes_all else constructor.names,
    )


# --- the contract -----------------------------------------------------------------------------------------------------


def _check_contract(cls: Any) -> None:
    """Raise ConfigError that lists everything which keeps `cls` from being an environment."""
    is_replayed = issubclass(cls, ReplayedEnvironment)
    contract = _CONTRACT | _REPLAYED if is_replayed else _CONTRACT
    abstract: Iterable[str] = getattr(cls, "__abstractmethods__", ())
    lacking = [usage for name, usage in contract.items() if name in abstract or not callable(getattr(cls, name, None))]
    if cls.__init__ in (object.__init__, ReplayedEnvironment.__init__):  # else the constructor may set them
        lacking += [each for each in _ATTRIBUTES if not hasattr(cls, each)]
    wrong = [f"it lacks {', '.join(lacking)}"] if lacking else []
    for name, usage in contract.items():
        if usage not in lacking and not _takes(cls, name, usage.count(",") + (not usage.endswith("()"))):
            wrong.append(f"{name}{inspect.signature(getattr(cls, name))} must be {usage}")
    if getattr(cls, "tasks", None) is not None and not _tasks_fit(cls):
        wrong.append(f"tasks must be a static or class method {_TASKS}")
    if wrong:
        hint = "" if is_replayed else "; headrace.ReplayedEnvironment brings all but tools(), _reset and _step"
        raise ConfigError(f"{defined_at(cls)}: {cls.__name__} is no environment: {'; '.join(wrong)}{hint}")


def _tasks_fit(cls: Any) -> bool:
    is_static = isinstance(inspect.getattr_static(cls, "tasks"), staticmethod | classmethod)
    parameters = list(inspect.signature(cls.tasks).parameters.values())[:2] if is_static else []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(parameters) == 2 and all(each.kind in by_place for each in parameters)


def _takes(cls: type, name: str, count: int) -> bool:
    """Whether the method can be called with `count` arguments besides the session."""
    is_static = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    try:
        inspect.signature(getattr(cls, name)).bind(*[None] * (count if is_static else count + 1))
    except TypeError:
        return False
    return True
