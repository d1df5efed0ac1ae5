"""Stored evaluations: `evaluations/NAME.json` of a run root, each written once and whole.

Names are `v000040-dev-03`: version, split, and the number of the evaluation in its run. The number is claimed
exclusively before anything is played, so that two processes never share a name or an episode id; a claim whose
evaluation was interrupted stays behind and is skipped.
"""

import os
from difflib import get_close_matches

import msgspec

from headrace.platform.errors import ConfigError, NotFound, SchemaError
from headrace.platform.records.evaluation import Evaluation
from headrace.platform.store.files import is_local, open_url, put, write_atomic
from headrace.platform.store.run_root import RunRoot

SCHEMA_VERSION = 1
MOST_SAMPLES = 500
"""Samples per task of one evaluation."""

_STRIDE = 2 * MOST_SAMPLES
_FOLDER, _CLAIMS = "evaluations", "evaluations/claims"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation may call its own: its name, its number in the run, and the `index` that makes the sample
    numbers `index * samples + s` of its episode ids its own."""

    name: str
    number: int
    index: int


class _Header(msgspec.Struct, frozen=True):
    """What is read of an evaluation to choose one."""

    name: str
    version: int | None
    created_at_s: float


class EvaluationStore:
    """The evaluations of one run root, a folder or fsspec URL. Any number of processes may claim, write and read."""

    def __init__(self, root_url: str) -> None:
        self._fs, self._root = open_url(root_url)

    def claim(self, version: int | None, split: str, samples: int) -> Claim:
        """A name and an index that no other evaluation of this run has.

        The sample numbers of evaluation n lie in [1000 n, 1000 (n + 1)), whatever its `samples`.

        Raises:
            ConfigError: more than 500 samples per task.
        """
        if not 1 <= samples <= MOST_SAMPLES:
            raise ConfigError(f"an evaluation plays 1 to {MOST_SAMPLES} samples per task, not {samples}")
        if is_local(self._fs):
            self._fs.makedirs(f"{self._root}/{_CLAIMS}", exist_ok=True)
        number = max([0, *self._claimed(), *self._named()]) + 1
        while not self._create(f"{self._root}/{_CLAIMS}/{number:04d}"):
            number += 1
        name, index = evaluation_name(version, split, number), -(-number * _STRIDE // samples)
        return Claim(name=name, number=number, index=index)

    def write(self, evaluation: Evaluation) -> str:
        """Store an evaluation under its name; its path relative to the root."""
        file = f"{_FOLDER}/{evaluation.name}.json"
        data = msgspec.json.format(msgspec.json.encode(evaluation), indent=1) + b"\n"
        write_atomic(self._fs, f"{self._root}/{file}", data)
        return file

    def read(self, name: str) -> Evaluation:
        """The evaluation called `name`.

        Raises:
            NotFound: there is none; names those that are near.
            SchemaError: it is of a schema that this build does not read.
        """
        names = self.names()
        if name not in names:
            near = get_close_matches(name, names) or names[-5:]
            raise NotFound(f"no evaluation {name!r}" + (f"; there are {', '.join(near)}" if near else ""))
        return decode_evaluation(self._fs.cat_file(self._file(name)), name)

    def names(self) -> list[str]:
        """The names of all evaluations, sorted."""
        self._fs.invalidate_cache()  # other processes write too
        files = self._fs.glob(f"{self._root}/{_FOLDER}/*.json")
        return sorted(str(file).rsplit("/", 1)[-1].removesuffix(".json") for file in files)

    def latest(self, version: int | None = None) -> Evaluation:
        """The newest evaluation, of all or of one version.

        Raises:
            NotFound: there is none.
            SchemaError: a file among them is no evaluation.
        """
        headers = [self._header(name) for name in self.names()]
        found = [each for each in headers if version is None or each.version == version]
        if not found:
            of_version = "" if version is None else f" of version {version}"
            known = f"; there are {', '.join(each.name for each in headers)}" if headers else ""
            raise NotFound(f"{self._root.rsplit('/', 1)[-1]} has no evaluation{of_version}{known}")
        return self.read(max(found, key=lambda each: (each.created_at_s, each.name)).name)

    def _header(self, name: str) -> _Header:
        try:
            return msgspec.json.decode(self._fs.cat_file(self._file(name)), type=_Header)
        except msgspec.MsgspecError as error:
            raise SchemaError(f"{self._file(name)} is not a stored evaluation: {error}") from error

    def _file(self, name: str) -> str:
        return f"{self._root}/{_FOLDER}/{name}.json"

    def _claimed(self) -> list[int]:
        self._fs.invalidate_cache()
        try:
            claims = self._fs.ls(f"{self._root}/{_CLAIMS}", detail=False)
        except FileNotFoundError:  # an object store has no empty folders
            return []
        names = (str(path).rsplit("/", 1)[-1] for path in claims)
        return [int(name) for name in names if _is_number(name)]

    def _named(self) -> list[int]:
        numbers = (name.rpartition("-")[2] for name in self.names())
        return [int(number) for number in numbers if _is_number(number)]

    def _create(self, path: str) -> bool:
        """Make an empty file, unless it is there already."""
        try:
            if is_local(self._fs):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            elif self._fs.exists(path):
                return False
            else:
                # Stores that can write conditionally do.
                put(self._fs, path, b"", mode="create")
        except FileExistsError:
            return False
        return True


def evaluation_name(version: int | None, split: str, number: int) -> str:
    """The name of the `number`-th evaluation of a run; `version` is None for a model that is no run's."""
    weights = "model" if version is None else f"v{version:06d}"
    return f"{weights}-{split}-{number:02d}"


def find_evaluation(runs_dir: str, reference: str) -> Evaluation:
    """The stored evaluation that people mean: the path of its file, RUN (its newest), RUN@NAME, RUN@VERSION or RUN@best
    (the newest of that version).

    Raises:
        ConfigError: the file is no evaluation.
        NotFound: there is no such run or evaluation, or not uniquely.
        SchemaError: the run's is of a schema that this build does not read.
    """
    if reference.endswith(".json"):
        return _from_file(reference)
    run, _, chosen = reference.partition("@") if "://" not in reference else reference.rpartition("@")
    root = RunRoot.find(runs_dir, run)
    store = EvaluationStore(root.url)
    number = chosen.removeprefix("v")
    if not chosen:
        return store.latest()
    if chosen == "best":
        return store.latest(int(root.read_best()["version"]))
    return store.latest(int(number)) if _is_number(number) else store.read(chosen)


def _from_file(url: str) -> Evaluation:
    """The evaluation in a file that somebody names: what is wrong with it is that it was named."""
    fs, path = open_url(url)
    if not fs.exists(path):
        raise NotFound(f"there is no file {url}")
    try:
        return decode_evaluation(fs.cat_file(path), url)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error


def _is_number(text: str) -> bool:
    """Whether `int` reads it, and nobody is surprised by what it reads."""
    return text.isascii() and text.isdecimal()


def decode_evaluation(data: bytes, name: str) -> Evaluation:
    """An evaluation from its stored form. Raises SchemaError that calls it `name`."""
    try:
        schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema_version")
        if schema is None:
            raise SchemaError(f"{name} is not a stored evaluation: it has no schema_version")
        if bytes(schema) != str(SCHEMA_VERSION).encode():
            raise SchemaError(f"{name}: schema {bytes(schema).decode()!r}; this build reads {SCHEMA_VERSION}")
        return msgspec.json.decode(data, type=Evaluation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SchemaError(f"{name} is not a stored evaluation: {error}") from error
