"""A user's own objects by name: `./file.py:Name`, or `package.module:Name` of something installed.

A file is loaded once per process, under a module name made from its path, so that two files of one name stay apart. It
may import its siblings (see `siblings`); two files that mean different modules by one name are refused. What goes
wrong on the way is a ConfigError that names the user's file and line.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.actors.environments.kind import Origin
from headrace.actors.frames import message_of, own_frame, user_frame
from headrace.actors.siblings import claim_siblings
from headrace.platform.errors import ConfigError, HeadraceError
from headrace.platform.hashing import digest

__all__ = ["is_target", "load_file", "load_target", "target_digest", "target_label", "user_frame"]


def is_target(name: str) -> bool:
    """Whether a name is that of an object in a file or module, rather than one that is registered."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon) and bool(place) and bool(attribute)


def load_target(target: str) -> tuple[Any, Origin]:
    """The object that `target` names, and where it was found.

    Args:
        target: `FILE.py:NAME`, absolute or relative to the current folder, or `PACKAGE.MODULE:NAME`.

    Raises:
        ConfigError: there is no such file, module or attribute, or loading it raised; names the file and line.
    """
    place, _, attribute = target.rpartition(":")
    parts = attribute.split(".")
    if not place or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{target!r} names no object; write ./file.py:Name or package.module:Name")
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        module, target = load_file(file), f"{file}:{attribute}"
    else:
        module = _load_module(place)
        file = Path(module.__file__ or "")
    value: Any = module
    for part in parts:
        value = _attribute(value, part, place)
    return value, Origin(target=target, file=file)


def target_label(target: str) -> str:
    """`target` without the folders that its file lies in: `sums.py:Sums`."""
    place, _, attribute = target.rpartition(":")
    return f"{Path(place).name}:{attribute}"


def target_digest(target: str) -> str:
    """SHA-256 of the file that `target` lies in, without loading it; empty where there is none."""
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        try:
            spec = find_spec(place)
        except Exception:  # it imports the package around the module, which is foreign code
            return ""
        place = (spec and spec.origin) or ""
    file = Path(place).expanduser()
    return digest(file.read_bytes()) if file.is_file() else ""


def load_file(file: Path) -> ModuleType:
    """The module of an absolute path.

    Raises:
        ConfigError: there is no such file, loading it raised, or it imports a sibling whose name is taken.
    """
    if not file.is_file():
        near = get_close_matches(file.name, [path.name for path in file.parent.glob("*.py")], n=1)
        raise ConfigError(f"there is no file {file}" + (f"; did you mean {near[0]}?" if near else ""))
    name = f"headrace_target_{digest(str(file).encode())[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    claim_siblings(file)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what only runs by name, such as import_module; last, to hide nothing
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # foreign code: whatever it raises is a wrong configuration
        del sys.modules[name]
        raise ConfigError(_explained(error, file.name)) from error
    return module


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{name!r} is neither a file that ends in .py nor the name of a module")
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # the same boundary
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"there is no module {error.name!r}; install its package, or give a file.py") from None
        raise ConfigError(_explained(error, name)) from error


def _attribute(owner: Any, name: str, place: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        known = [each for each in dir(owner) if not each.startswith("_")]
        near = get_close_matches(name, known, n=1)
        where = Path(place).name if place.endswith(".py") else place
        raise ConfigError(f"{where} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")) from None


def _explained(error: BaseException, name: str) -> str:
    """`sums.py:12: NameError: …`; what headrace itself says needs no type, and may name the place already."""
    text = message_of(error)
    if not isinstance(error, HeadraceError):
        text = f"{type(error).__name__}: {text}"
    return text if text.startswith(f"{name}:") else f"{own_frame(error) or name}: {text}"
