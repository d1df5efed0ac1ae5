"""A run root: the folder, or fsspec URL, that holds everything a run leaves behind.

Owns its layout (docs/design.md section 10) and how a run is found by name. What is in the files belongs to whoever
writes them.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.store.files import is_local, open_url, write_atomic

FOLDERS = (
    "episodes",
    "rewards",
    "fates",
    "receipts",
    "versions",
    "checkpoints",
    "evaluations",
    "status",
    "audit",
    "queue",
    "outbox",
    "logs",
    "figures",
)
_CONFIG, _SUMMARY, _METRICS, _BEST = "config.yaml", "summary.json", "metrics.jsonl", "best.json"


class RunRoot:
    """One run's root. Made by `create` or `find`."""

    def __init__(self, url: str) -> None:
        self._fs, self._path = open_url(url)
        self.url = str(self._fs.unstrip_protocol(self._path)) if not is_local(self._fs) else self._path

    @property
    def is_local(self) -> bool:
        """Whether the root lies on a disk of this host."""
        return is_local(self._fs)

    @property
    def name(self) -> str:
        """The run's id: the last part of the path."""
        return self._path.rsplit("/", 1)[-1]

    @classmethod
    def create(cls, runs_dir: str, run: str, config_yaml: str) -> "RunRoot":
        """A new root with its folders and `config.yaml`.

        Raises:
            ConfigError: when the run exists already, or nothing can be written there.
        """
        root = cls(f"{runs_dir.rstrip('/')}/{run}")
        try:
            if root._fs.exists(root._path):
                raise ConfigError(f"the run {run!r} exists already in {runs_dir}; resume it, or choose another name")
            for folder in FOLDERS if root.is_local else ():  # object stores have none
                root._fs.makedirs(f"{root._path}/{folder}", exist_ok=True)
            write_atomic(root._fs, f"{root._path}/{_CONFIG}", config_yaml.encode())
        except OSError as error:
            raise ConfigError(f"runs_dir: nothing can be written to {runs_dir}: {error}") from error
        return root

    @classmethod
    def find(cls, runs_dir: str, prefix: str) -> "RunRoot":
        """The run in `runs_dir` whose name is `prefix`, or begins with it alone; or the run at the path `prefix`.

        Raises:
            NotFound: for none, or for several: then it lists them.
        """
        if "/" in prefix:
            root = cls(prefix)
            if not root._fs.exists(f"{root._path}/{_CONFIG}"):
                raise NotFound(f"{prefix} is not a run root: it has no {_CONFIG}")
            return root
        names = cls._names(runs_dir)
        matches = [prefix] if prefix in names else [name for name in names if name.startswith(prefix)]
        if len(matches) == 1:
            return cls(f"{runs_dir.rstrip('/')}/{matches[0]}")
        if matches:
            raise NotFound(f"{prefix!r} fits {len(matches)} runs: {', '.join(matches)}")
        near = get_close_matches(prefix, names) or names[-5:]
        raise NotFound(
            f"no run {prefix!r} in {runs_dir}" + (f"; there are {', '.join(near)}" if near else "; it holds no runs")
        )

    @staticmethod
    def _names(runs_dir: str) -> list[str]:
        fs, path = open_url(runs_dir)
        fs.invalidate_cache()
        return sorted(file.rsplit("/", 2)[-2] for file in fs.glob(f"{path}/*/{_CONFIG}"))

    def join(self, name: str) -> str:
        """The URL of `name` in this root."""
        return f"{self.url}/{name}"

    @property
    def metrics(self) -> str:
        """The URL of `metrics.jsonl`."""
        return self.join(_METRICS)

    @property
    def summary(self) -> str:
        """The URL of `summary.json`."""
        return self.join(_SUMMARY)

    def local(self, name: str) -> Path:
        """The path of `name`, for parts that need a local disk such as the queue's append-only file.

        Raises:
            ConfigError: when this root is not on a local disk.
        """
        if not is_local(self._fs):
            raise ConfigError(f"{name} of the run {self.name!r} must lie on a local disk, but the root is {self.url}")
        return Path(self._path) / name

    def read_config(self) -> str:
        """The text of `config.yaml`."""
        return str(self._fs.cat_file(f"{self._path}/{_CONFIG}").decode())

    def write_config(self, text: str) -> None:
        """Replace `config.yaml`: a resumed run may have other settings than before."""
        write_atomic(self._fs, f"{self._path}/{_CONFIG}", text.encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`; a reader sees the old one or the new one, whole.

        Raises:
            ValueError: for a number that JSON has no word for, such as NaN.
        """
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        write_atomic(self._fs, f"{self._path}/{_SUMMARY}", text.encode())

    def write_best(self, best: Mapping[str, Any]) -> None:
        """Replace `best.json`, which names the version with the best evaluation."""
        write_atomic(self._fs, f"{self._path}/{_BEST}", (json.dumps(best, allow_nan=False) + "\n").encode())

    def read_best(self) -> dict[str, Any]:
        """What `write_best` wrote.

        Raises:
            NotFound: when no version has been evaluated yet.
        """
        try:
            return dict(json.loads(self._fs.cat_file(f"{self._path}/{_BEST}")))
        except FileNotFoundError:
            raise NotFound(f"the run {self.name!r} has no {_BEST}: none of its versions has been evaluated") from None

    def read_summary(self) -> dict[str, Any]:
        """What `write_summary` wrote.

        Raises:
            NotFound: when the run has no summary yet.
        """
        try:
            return dict(json.loads(self._fs.cat_file(f"{self._path}/{_SUMMARY}")))
        except FileNotFoundError:
            raise NotFound(f"the run {self.name!r} has no {_SUMMARY} yet") from None
