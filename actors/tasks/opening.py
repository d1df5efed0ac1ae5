"""Opens the tasks that a recipe or an environment names, and sees to it that splits stay apart (case V2).

Three things can be a source: rows (files, folders, data sets, lists), a function of a seed, and `reasoning_gym:NAME`.
Dev and hidden come from sources of their own or are shares of the main one, which are decided by content.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.actors.frames import described
from headrace.actors.tasks.finite import FiniteTasks, GivenTasks
from headrace.actors.tasks.generated import GeneratedTasks, Maker, check_ranges
from headrace.actors.tasks.reading import Parts, read_dataset, read_given, read_path
from headrace.actors.tasks.rows import Rows
from headrace.actors.tasks.splits import Part, Shares, check_apart, require
from headrace.platform.config.tasks import SPLITS, TasksConfig
from headrace.platform.contracts import TaskSource
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task

_TARGET = re.compile(r".+:[A-Za-z_][\w.]*")
_GYM = "reasoning_gym:"
_SHARE = 0.1  # of what a generator makes, for a split with a generator of its own


def open_tasks(config: TasksConfig, split: str, seed: int, environment: str) -> TaskSource:
    """The tasks of one split of a recipe's `tasks` section; they bear the name `environment`.

    Raises:
        ConfigError: a source is missing, empty, of no known kind or has a row that cannot be used (named by file and
            row), the split is empty, or two splits share a task or a seed.
    """
    main = _opened(config.source, None, config.limit, config.args)
    held = {
        name: _own_part(_opened(source, None, config.limit, config.args), name)
        for name, source in (("dev", config.dev), ("hidden", config.hidden))
        if source
    }
    if not any(isinstance(each, Maker) for each in (main, *held.values())):
        for key in ("seeds", "args"):
            if getattr(config, key):
                raise ConfigError(f"tasks.{key} is for generators, and {config.source} is none; remove it")
    names = [source for source in (config.source, config.dev, config.hidden) if source]
    return _chosen(main, held, config, split, seed, environment, names)


def rows_tasks(
    rows: Any,
    split: str,
    seed: int,
    environment: str,
    base: Path | None = None,
    dev_share: float = 0.1,
    hidden_share: float = 0.1,
    *,
    whole: bool = False,
) -> TaskSource:
    """The tasks of one split of what an environment brings along.

    Args:
        rows: mappings; a path as `TasksConfig.source` takes it; a function `f(seed) -> dict`; a `datasets` Dataset or
            DatasetDict; or Tasks, which say themselves which split they are of.
        base: the folder that a relative path starts from; None for the current one.
        whole: `rows` are those of this split already, and no share is taken.

    Raises:
        ConfigError: as `open_tasks`.
    """
    if not isinstance(rows, str | Path | Mapping) and not callable(rows) and not _is_dataset(rows):
        if isinstance(rows, Iterator) and not whole:
            raise ConfigError(f"the rows of {environment} can be read only once; give a list, or a function of a seed")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"the rows of {environment} are {type(rows).__name__}; give a list of dicts or a path")
        rows = list(rows)
        if rows and all(isinstance(row, Task) for row in rows):
            return GivenTasks(rows, split, seed, environment)
    config = TasksConfig(source="rows", dev_share=dev_share, hidden_share=hidden_share)
    main = _opened(rows, base, 0, {})
    if whole and isinstance(part := _own_part(main, split), Rows):
        return FiniteTasks(_whole(part), split, seed, environment)
    names = [str(rows) if isinstance(rows, str | Path) else environment]
    return _chosen(main, {}, config, split, seed, environment, names)


def _chosen(
    opened: Parts | Maker,
    held: Mapping[str, Rows | Maker],
    config: TasksConfig,
    split: str,
    seed: int,
    environment: str,
    names: Sequence[str],
) -> TaskSource:
    """The source of `split`, after the splits were compared."""
    main = _own_part(opened, "train")
    own: dict[str, Rows | Maker] = {}  # what dev and hidden come from, where that is not a share of the main source
    if not isinstance(opened, Maker):
        own |= {name: rows for name, rows in opened.items() if name in ("dev", "hidden")}
    own |= held
    parts = {name: _whole(rows) for name, rows in own.items() if isinstance(rows, Rows)}
    if isinstance(main, Rows):
        shares = {name: 0.0 if name in own else share for name, share in _shares(config).items()}
        divided = Shares(**shares).divide(main)
        parts |= {name: Part(rows=main, indices=divided[name]) for name in SPLITS if name not in own}
    check_apart(parts)
    makers = {name: each for name in SPLITS if isinstance(each := own.get(name, main), Maker)}
    ranges = {str(name): seeds for name, seeds in config.seeds.items() if name in makers}
    check_ranges(makers, ranges)
    if split in parts:
        require(split, parts[split], names)
        return FiniteTasks(parts[split], split, seed, environment, f"{split}-" if split in own else "")
    if split not in ranges and split not in own and _shares(config).get(split) == 0:
        raise ConfigError(f"tasks.{split}_share is 0, so there are no tasks of the split {split!r}; give it a share")
    accepts = _accepts(split, makers, own, parts, config)
    return GeneratedTasks(makers[split], split, seed, environment, accepts, seeds=ranges.get(split), limit=config.limit)


def _accepts(
    split: str,
    makers: Mapping[str, Maker],
    own: Mapping[str, Rows | Maker],
    parts: Mapping[str, Part],
    config: TasksConfig,
) -> Callable[[bytes], bool]:
    """Whether what a generator makes may be in `split`: it is no row of another split, and where generators make
    several splits without ranges for all of them, its content belongs to this one."""
    taken = frozenset[bytes]().union(*(part.digests() for part in parts.values()))
    shares = {
        name: 0.0 if name not in makers else share or (_SHARE if name in own else 0.0)
        for name, share in _shares(config).items()
    }
    is_divided = len(makers) > 1 and not makers.keys() <= config.seeds.keys()
    owner = Shares(**shares)
    return lambda digest: digest not in taken and (not is_divided or owner.split_of(digest) == split)


def _shares(config: TasksConfig) -> dict[str, float]:
    return {"dev": config.dev_share, "hidden": config.hidden_share}


def _own_part(opened: Parts | Maker, split: str) -> Rows | Maker:
    """What of a source belongs to `split` when the source is for that split: all, or its part of that name."""
    if isinstance(opened, Maker):
        return opened
    if split in opened or "" in opened:
        return opened[split if split in opened else ""]
    raise ConfigError(f"the data set for {split} has no such split, only {', '.join(opened)}")


def _whole(rows: Rows) -> Part:
    return Part(rows=rows, indices=np.arange(len(rows)))


# --- sources ----------------------------------------------------------------------------------------------------------


def _is_dataset(source: object) -> bool:
    return type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "with_format")


def _opened(source: Any, base: Path | None, limit: int, args: Mapping[str, Any]) -> Parts | Maker:
    if isinstance(source, str | Path):
        text = str(source)
        if text.startswith(_GYM):
            from headrace.actors.tasks.reasoning_gym import gym_maker

            return gym_maker(text.removeprefix(_GYM), args)
        path = (base or Path()) / text
        if _TARGET.fullmatch(text) and not path.exists():
            return _target_maker(text, base, args)
        return read_path(path, limit)
    if _is_dataset(source):
        if not isinstance(source, Mapping) and not hasattr(source, "__len__"):
            raise ConfigError("a streamed data set has no length; save it with save_to_disk and give the folder")
        return read_dataset(source, limit=limit)
    if callable(source):
        return _maker(source, Path(inspect.getsourcefile(source) or "?"), args)
    return {"": read_given(source, limit)}


def _target_maker(target: str, base: Path | None, args: Mapping[str, Any]) -> Maker:
    from headrace.actors.targets import load_target

    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        target = f"{(base or Path()) / place}:{name}"
    function, origin = load_target(target)
    return _maker(function, origin.file, args)


def _maker(function: Any, file: Path, args: Mapping[str, Any]) -> Maker:
    """Wrap a user's function, whose errors name its file and line."""
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(f"{file}: {name} is no function; a generator is `def {name}(seed, **args) -> dict`")
    try:
        inspect.signature(function).bind(0, **args)
    except TypeError as error:
        raise ConfigError(f"{file}: the generator {name}(seed, **args) cannot be called: {error}") from None

    def generate(seed: int) -> object:
        try:
            return function(seed, **args)
        except Exception as error:  # foreign code: whatever it raises is the configuration's fault
            raise ConfigError(f"{described(error)} (generator {name}, seed {seed})") from error

    return Maker(generate=generate)
