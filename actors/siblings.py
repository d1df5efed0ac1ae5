"""The modules that lie beside a user's file, and whose they are.

A file may import its siblings by their bare names, at once or later. A process has one module of a name, so each name
has one owner: the folder of the file that was loaded first. A name that somebody else has already (another folder, an
installed package, the standard library) is a ConfigError: the file would get that module in place of its sibling. What
a file imports is read from its source, siblings of siblings included; `importlib.import_module` is not seen.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from headrace.platform.errors import ConfigError


def claim_siblings(file: Path) -> None:
    """Make what `file` imports from its own folder importable under its bare name, and nothing else.

    Raises:
        ConfigError: for a sibling whose name is taken; names both and the remedy.
    """
    finder = next((each for each in sys.meta_path if isinstance(each, _SiblingFinder)), None)
    if finder is None:
        finder = _SiblingFinder()
        sys.meta_path.insert(0, finder)
    names = _siblings_of(file)
    for name in names:
        if taken := _taken(name, file.parent, finder):
            raise ConfigError(
                f"{file} imports {name}, which means {_place(file.parent, name)}, but in this process the name belongs"
                f" to {taken}: rename one of the two, or make a package of {file.name} and its siblings"
                f" (from package.{name} import …) and name it as package.{file.stem}:NAME"
            )
    finder.owners |= dict.fromkeys(names, file.parent)


class _SiblingFinder(MetaPathFinder):
    """Finds the siblings that were claimed, each in the folder that owns its name."""

    def __init__(self) -> None:
        self.owners: dict[str, Path] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        folder = self.owners.get(fullname)
        return PathFinder.find_spec(fullname, [str(folder)]) if folder else None


def _taken(name: str, folder: Path, finder: _SiblingFinder) -> str:
    """Who has the name, if that is not `folder`; empty where it is free."""
    owner = finder.owners.get(name, folder)
    if owner != folder:
        return str(_place(owner, name))
    if name in sys.stdlib_module_names:
        return "the standard library"
    if (loaded := sys.modules.get(name)) is not None:
        places = [getattr(loaded, "__file__", None), *(getattr(loaded, "__path__", None) or ())]
        found = [Path(place).resolve() for place in places if place]
        own = _place(folder, name)
        return "" if {own, own / "__init__.py"} & {*found} else str(found[0] if found else loaded)
    installed = PathFinder.find_spec(name, _packages())
    return f"the installed {installed.origin}" if installed and installed.origin else ""


def _siblings_of(file: Path) -> set[str]:
    """The names that `file` imports from its own folder, and those that these import."""
    folder, found, unread = file.parent, set[str](), [file]
    if str(folder) in _packages():
        return found
    while unread:
        for name in set(_imports(unread.pop())) - found:
            if _is_sibling(name, folder):
                found.add(name)
                place = _place(folder, name)
                unread += [place] if place.is_file() else place.rglob("*.py")
    return found


def _is_sibling(name: str, folder: Path) -> bool:
    place = _place(folder, name)
    if place.is_file() or (place / "__init__.py").is_file():
        return True
    if not place.is_dir() or next(place.rglob("*.py"), None) is None:
        return False
    # A folder without __init__.py stands back behind any module of its name, as always in Python.
    others = [each for each in sys.path if Path(each) != folder]
    spec = PathFinder.find_spec(name, others)
    return name not in sys.stdlib_module_names and (spec is None or spec.origin is None)


def _place(folder: Path, name: str) -> Path:
    package, module = folder / name, folder / f"{name}.py"
    return module if module.is_file() and not (package / "__init__.py").is_file() else package


def _imports(file: Path) -> Iterator[str]:
    """The first parts of all modules that a file imports by absolute name, anywhere in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever loads it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _packages() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
