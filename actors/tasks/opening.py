"""Opens the tasks that a recipe or an environment names, and sees to it that splits stay apart (case V2).

Three things can be a source: rows (files, folders, data sets, lists), a function of a seed, and `reasoning_gym:NAME`.
Dev and hidden come from sources of their own or are shares of the main one, which are decided by content.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.actors.frames import defined_at, described
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
_FAR = re.compile(r"\w+://.*|[A-Za-z0-9][\w.-]*/(?!.*\.(jsonl|parquet)$)[\w.-]+")  # an address, or OWNER/NAME
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
        whole: `rows` are those of this split already, and no share is taken. As always where splits have sources of
            their own, the ids of dev and hidden begin with the split.

    Raises:
        ConfigError: as `open_tasks`.
    """
    refuse_columns(rows, f"the rows of {environment}")
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
        return FiniteTasks(_whole(part), split, seed, environment, "" if split == "train" else f"{split}-")
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


def refuse_columns(rows: object, name: str) -> None:
    """Raise ConfigError that says how to make rows of a table or of a dict of columns."""
    is_frame = hasattr(rows, "columns") and not _is_dataset(rows)
    for method, way in (("to_dicts", ".to_dicts()"), ("to_pylist", ".to_pylist()"), ("to_dict", '.to_dict("records")')):
        if is_frame and hasattr(rows, method):
            raise ConfigError(f"{name} are a {type(rows).__name__}; give a list of dicts, such as df{way}")
    if isinstance(rows, Mapping) and not _is_dataset(rows):
        raise ConfigError(
            f"{name} are a dict of columns; give a list of dicts, one a row, such as"
            ' pandas.DataFrame(columns).to_dict("records")'
        )


def _opened(source: Any, base: Path | None, limit: int, args: Mapping[str, Any]) -> Parts | Maker:
    if isinstance(source, str | Path):
        text = str(source)
        if text.startswith(_GYM):
            from headrace.actors.tasks.reasoning_gym import gym_maker

            return gym_maker(text.removeprefix(_GYM), args)
        path = (base or Path()) / Path(text).expanduser()
        if _TARGET.fullmatch(text) and not path.exists():
            return _target_maker(text, base, args)
        if _FAR.fullmatch(text) and not path.exists():
            raise ConfigError(
                f"{text} is not a file here, and headrace downloads nothing; get it first (a data set of a hub with"
                " load_dataset and save_to_disk of the package `datasets`) and give its file or folder"
            )
        return read_path(path, limit)
    if _is_dataset(source):
        if not isinstance(source, Mapping) and not hasattr(source, "__len__"):
            raise ConfigError("a streamed data set has no length; save it with save_to_disk and give the folder")
        return read_dataset(source, limit=limit)
    if callable(source):
        return _maker(source, defined_at(_function_of(source)).rpartition(":")[0], args)
    return {"": read_given(source, limit)}


def _target_maker(target: str, base: Path | None, args: Mapping[str, Any]) -> Maker:
    from headrace.actors.targets import load_target

    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        target = f"{(base or Path()) / Path(place).expanduser()}:{name}"
    function, origin = load_target(target)
    return _maker(function, str(origin.file), args)


def _maker(function: Any, file: str, args: Mapping[str, Any]) -> Maker:
    """Wrap a user's function, whose errors name its file and line. `file` may be empty."""
    name = getattr(_function_of(function), "__name__", type(function).__name__)
    where = f"{file}: " if file else ""
    if not callable(function):
        raise ConfigError(f"{where}{name} is no function; a generator is `def {name}(seed, **args) -> dict`")
    try:
        inspect.signature(function).bind(0, **args)
    except TypeError as error:
        raise ConfigError(f"{where}the generator {name}(seed, **args) cannot be called: {error}") from None
    except ValueError:  # some built-in functions have no signature; calling them shows what they take
        pass

    def generate(seed: int) -> object:
        try:
            return function(seed, **args)
        except Exception as error:  # foreign code: whatever it raises is the configuration's fault
            raise ConfigError(f"{described(error)} (generator {name}, seed {seed})") from error

    return Maker(generate=generate)


def _function_of(source: Any) -> Any:
    """What a partial function calls in the end; anything else itself."""
    while isinstance(source, functools.partial):
        source = source.func
    return source
