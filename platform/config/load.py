"""Reads a recipe into a `RunConfig`: named or by path, on top of what it `extends`, with `key=value` overrides.

Every wrong key and value of a recipe is reported at once, by its full dotted path (case V3). Sections merge key by key
with those of the recipe that is extended; lists replace. A value that begins with `./` or `../` is a path: in a recipe
it is relative to the recipe's folder, in an override to the current one. Other paths are relative to the current
folder. In the result all are absolute, so that a stored configuration means the same everywhere. Secrets stay
references here: they are resolved where they are used. Where the recipes lie is the caller's business, as this layer
does not know deploy.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.platform.config.explain import problems
from headrace.platform.config.overrides import apply_overrides
from headrace.platform.config.run import RunConfig
from headrace.platform.config.secret_references import literal_password
from headrace.platform.config.yaml_text import dump, parse_yaml
from headrace.platform.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")
_PATH_KEYS = ("path", "gguf", "source", "dev", "hidden", "data", "episodes", "workspace", "corpus", "cwd")
_ENVIRONMENT_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")


def load_recipe(name_or_path: str, overrides: Sequence[str], recipes_dir: Path) -> RunConfig:
    """The configuration that a recipe and `key=value` overrides describe.

    `name_or_path` is the stem of a file in `recipes_dir`, a path that ends in .yaml or holds a slash, or an environment
    as `file.py:Name`: that is a recipe with this environment and every default. Raises ConfigError that lists all that
    is wrong.
    """
    if _ENVIRONMENT_FILE.fullmatch(name_or_path):
        data = _around_environment(name_or_path)
    else:
        data = _read(_find(name_or_path, recipes_dir, Path()), recipes_dir, ())
    return _validated(data, overrides, f"recipe {name_or_path}")


def config_from_text(text: str, overrides: Sequence[str], name: str) -> RunConfig:
    """The configuration that `dump_yaml` wrote, with `key=value` overrides; `name` is for messages. Raises ConfigError
    that lists all that is wrong."""
    data = parse_yaml(text)
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must hold keys and values")
    return _validated(data, overrides, name)


def _validated(data: dict[str, Any], overrides: Sequence[str], name: str) -> RunConfig:
    wrong = apply_overrides(data, overrides)
    data = _with_files_here(_with_absolute_paths(data, Path()))
    wrong += [_spelled_out(path) for path, text in _strings(data) if literal_password(text)]
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        wrong += problems(error, RunConfig, data)
    if wrong:
        count = "1 error" if len(wrong) == 1 else f"{len(wrong)} errors"
        raise ConfigError(f"{name}: {count}\n" + "\n".join(f"  - {line}" for line in wrong))
    return config


def dump_yaml(config: RunConfig) -> str:
    """The whole configuration, defaults included, as a recipe that loads to an equal one. Secrets stay references."""
    return dump(config.model_dump(mode="json"))


def known_recipes(recipes_dir: Path) -> list[str]:
    """The names that `load_recipe` takes, sorted."""
    return sorted(path.stem for path in recipes_dir.iterdir() if path.suffix in _SUFFIXES)


def _find(name_or_path: str, recipes_dir: Path, relative_to: Path) -> Path:
    if name_or_path.endswith(".py"):
        name = Path(name_or_path).name
        raise ConfigError(f"which object of {name} is the environment? Write {name}:Name")
    if name_or_path.endswith(_SUFFIXES) or "/" in name_or_path:
        path = relative_to / Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {path}")
        return path
    names = known_recipes(recipes_dir)
    if name_or_path not in names:
        close = get_close_matches(name_or_path, names, 1, 0)
        nearest = f"; nearest: {close[0]}" if close else ""
        raise ConfigError(
            f"there is no recipe {name_or_path!r}; known: {', '.join(names) or 'none'}{nearest}."
            " Give one of them, or the path of a YAML file"
        )
    return next(path for suffix in _SUFFIXES if (path := recipes_dir / f"{name_or_path}{suffix}").is_file())


def _read(path: Path, recipes_dir: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """The data of a recipe file, merged over that of the recipe it extends."""
    if path.resolve() in extended_by:
        chain = " -> ".join(each.name for each in (*extended_by, path))
        raise ConfigError(f"recipes extend each other in a circle: {chain}")
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold keys and values, such as `seed: 1`")
    base = data.pop("extends", None)
    data = _with_absolute_paths(data, path.parent)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends must be the name or the path of one recipe")
    found = _find(base, recipes_dir, path.parent)
    return _merged(_read(found, recipes_dir, (*extended_by, path.resolve())), data)


def _around_environment(target: str) -> dict[str, Any]:
    """The least recipe that plays `file.py:Name`."""
    file, _, attribute = target.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}, so no environment {target}")
    name = re.sub(r"[^a-z0-9]+", "-", attribute.lower()).strip("-") or "run"
    return {"name": name, "environments": [{"name": f"{path.resolve()}:{attribute}"}]}


def _with_absolute_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Plain data whose strings that begin with ./ or ../ are paths from `folder`, made absolute; not those that
    permissions are about, which are seen from the workspace."""

    def absolute(node: Any, within: bool = False) -> Any:
        if isinstance(node, str) and node.startswith(("./", "../")):
            return str((folder / node).resolve())
        if isinstance(node, dict):
            return {
                key: child if within and key == "paths" else absolute(child, within or key == "permissions")
                for key, child in node.items()
            }
        return [absolute(child, within) for child in node] if isinstance(node, list) else node

    return {key: absolute(value) for key, value in data.items()}


def _with_files_here(node: Any, key: str = "") -> Any:
    """Plain data in which the names of files and folders of the current folder, and of `~`, are absolute."""
    if isinstance(node, dict):
        return {name: _with_files_here(child, name) for name, child in node.items()}
    if isinstance(node, list):
        return [_with_files_here(child, key) for child in node]
    if not isinstance(node, str) or not (key in _PATH_KEYS or _ENVIRONMENT_FILE.fullmatch(node)):
        return node
    file, colon, attribute = node.partition(".py:")
    path = Path(f"{file}.py" if colon else file).expanduser()
    return f"{path.resolve()}{colon and ':'}{attribute}" if node and path.exists() else node


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All strings of plain data with their dotted paths."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _strings(child, f"{path}.{key}" if path else str(key))


def _spelled_out(path: str) -> str:
    return (
        f"{path}: a password is spelled out in this URL, and the configuration is stored with the run;"
        " refer to it instead: ${env:NAME} or ${file:PATH}, such as redis://:${env:REDIS_PASSWORD}@host:6379"
    )
