"""Run roots that are not on a disk of this host, as far as that needs no server: lines in segments, and refusals."""

import json
import sys

import fsspec
import pytest
from conftest import RECIPES
from run_kit import run_inprocess, small_config
from typer.testing import CliRunner

from headrace.deploy.checks import check_config, check_runs_dir
from headrace.deploy.cli import app
from headrace.deploy.context import RunContext
from headrace.deploy.shared_model import model_here, share_model
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, RegistryError
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.parts import ALIVE_EVERY_S, WRITE_EVERY_S, Part
from headrace.platform.store import lines
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import LineWriter, line_files, read_files
from headrace.platform.store.run_root import RunRoot


@pytest.fixture
def root(tmp_path) -> str:
    return f"memory://{tmp_path.name}"


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(lines, "SEGMENT_BYTES", 12)


def writer(root: str, name: str) -> LineWriter:
    fs, path = open_url(root)
    return LineWriter(fs, f"{path}/fates/{name}.jsonl")


def read(root: str, name: str = "*") -> list[str]:
    fs, path = open_url(root)
    files = line_files(fs, f"{path}/fates/{name}.jsonl")
    return b"".join(data for _, data in read_files(fs, files)).decode().splitlines()


def names(root: str) -> list[str]:
    fs, path = open_url(root)
    return [file.rsplit("/", 1)[-1] for file in line_files(fs, f"{path}/fates/*.jsonl")]


class TestLines:
    def test_segments_grow_to_their_size_and_keep_the_order(self, root, small_segments):
        one = writer(root, "driver")
        for number in range(6):
            one.append(b"%05d\n" % number)
        assert len(names(root)) == 3
        assert read(root, "driver") == [f"{number:05d}" for number in range(6)]

    def test_an_append_is_one_request(self, root, monkeypatch):
        one = writer(root, "driver")
        one.append(b"first\n")
        calls = []
        fs = open_url(root)[0]
        for name in ("ls", "info", "cat_file", "open", "makedirs", "exists"):
            monkeypatch.setattr(type(fs), name, lambda *_, name=name, **__: calls.append(name))
        monkeypatch.setattr(type(fs), "pipe_file", lambda _, path, data, **__: calls.append(data))
        one.append(b"second\n")
        assert calls == [b"first\nsecond\n"]

    def test_a_writer_that_is_started_again_comes_after_itself(self, root, small_segments):
        for boot in range(12):
            writer(root, "rollout-1").append(b"boot %d\n" % boot)
        writer(root, "rollout-10").append(b"another\n")
        assert read(root, "rollout-1") == [f"boot {boot}" for boot in range(12)]
        assert read(root) == [*read(root, "rollout-1"), "another"]

    def test_two_processes_of_one_name_do_not_write_over_each_other(self, root):
        """A worker that was taken for dead, and the one in its place."""
        old, new = writer(root, "rollout-0"), writer(root, "rollout-0")
        for number in range(3):
            old.append(b"old %d\n" % number)
            new.append(b"new %d\n" % number)
        assert sorted(read(root)) == [f"{who} {number}" for who in ("new", "old") for number in range(3)]

    def test_what_failed_may_be_tried_again(self, root, monkeypatch):
        one = writer(root, "driver")
        one.append(b"a\n")
        with monkeypatch.context() as broken:
            broken.setattr(lines, "put", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
            with pytest.raises(ConnectionError):
                one.append(b"b\n")
        one.append(b"b\n")
        assert read(root) == ["a", "b"]

    @pytest.mark.parametrize("remote_first", [True, False])
    def test_a_root_that_was_copied_goes_on_in_order(self, root, tmp_path, remote_first):
        here = str(tmp_path / "run")
        first, then = (root, here) if remote_first else (here, root)
        for number in range(2):
            writer(first, "driver").append(b"first %d\n" % number)
        (fs, path), (other, target) = open_url(first), open_url(then)
        for file in fs.find(f"{path}/fates"):
            other.makedirs(f"{target}/fates", exist_ok=True)
            other.pipe_file(f"{target}/fates/{file.rsplit('/', 1)[-1]}", fs.cat_file(file))
        writer(then, "driver").append(b"then\n")
        assert read(then, "driver") == read(then) == ["first 0", "first 1", "then"]

    def test_no_lines(self, root):
        assert read(root) == []
        with pytest.raises(FileNotFoundError, match="no metrics at"):
            list(read_metrics(f"{root}/metrics.jsonl"))


class TestWhatIsRefused:
    def test_s3_without_its_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(ConfigError, match=r"s3://bucket/runs cannot be opened.*pip install 'headrace\[s3\]'"):
            open_url("s3://bucket/runs")
        result = CliRunner().invoke(app, ["train", "lookup", "runs_dir=s3://bucket/runs", "--dry-run"])
        assert isinstance(result.exception, ConfigError)

    def test_what_nobody_knows(self):
        with pytest.raises(ConfigError, match="nope://x is no URL that can be opened: Protocol not known: nope"):
            open_url("nope://x")

    def test_the_memory_of_one_process_for_several(self):
        config = load_recipe("lookup", ["runs_dir=memory://runs"], RECIPES)
        with pytest.raises(ConfigError, match=r"lies in the memory of one process, and runtime\.kind=ray has several"):
            check_config(config)
        check_runs_dir(load_recipe("lookup", ["runs_dir=memory://runs", "runtime.kind=inprocess"], RECIPES))

    def test_a_place_that_cannot_be_written_to(self, tmp_path):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(ConfigError, match="runs_dir: nothing can be written to"):
            RunRoot.create(str(tmp_path / "file"), "run", "")


def test_a_part_speaks_seldom_where_every_word_is_a_request(root, tmp_path):
    remote, local = Part(root, "learner"), Part(str(tmp_path), "learner")
    assert (remote._every_s, local._every_s) == (ALIVE_EVERY_S, WRITE_EVERY_S)
    remote.start()
    remote.set("working")
    remote.close("done")
    fs, path = open_url(root)
    assert json.loads(fs.cat_file(f"{path}/status/learner.json"))["state"] == "done"


@pytest.mark.parametrize("remote", [True, False])
def test_every_node_of_a_cluster_finds_the_model(root, own_home, tmp_path, remote):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = load_recipe("lookup", [], RECIPES)
    context = RunContext(run="run", root=f"{root}/run" if remote else str(tmp_path / "run"), config=config)
    shared = share_model(context, model)
    assert (model_here(context, shared) / "config.json").read_text() == "{}"
    assert (own_home in model_here(context, shared).parents) == remote
    if remote:
        (model_here(context, shared) / "config.json").write_text("altered")
        assert (model_here(context, shared) / "config.json").read_text() == "{}"
        RunRoot(context.root)._fs.pipe_file(f"{RunRoot(context.root)._path}/base/config.json", b"other")
        (model_here(context, shared) / "config.json").unlink()
        with pytest.raises(RegistryError, match="altered"):
            model_here(context, shared)


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_run_whose_root_is_in_memory(lookup_model, root, own_home, tmp_path):
    """Nothing of the run lies on the disk but what belongs to the node; and every command reads it."""
    config = small_config(lookup_model, root, "learner.steps=2", "loggers=[{kind: tensorboard}]")
    summary, stored = run_inprocess(config)
    assert summary["equation_holds"] and summary["learner_steps"] == 2
    local = RunContext(run=stored.name, root=stored.url, config=config).local("logs")
    assert own_home in local.parents
    assert list((local / "tensorboard").glob("events.*")), "the files of loggers lie on the node"
    assert {file.rsplit("/", 1)[-1][:7] for file in fsspec.filesystem("memory").ls(stored._path, detail=False)} >= {
        "summary",
        "metrics",
        "events-",
        "best.js",
    }
    shown = [CliRunner().invoke(app, [*command, "--runs-dir", root]) for command in _commands(stored, tmp_path)]
    assert [each.exit_code for each in shown] == [0] * len(shown), [each.output for each in shown]
    status, inspected, token_by_token, replayed = (each.output for each in shown[:4])
    assert "finished, learner step 2 of 2, version 2" in status
    assert "episodes are stored" in inspected
    assert "<end>" in token_by_token, "tokens are decoded with the tokenizer of a stored version"
    assert "no hash differs" in replayed
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 1e5


def _commands(root: RunRoot, tmp_path) -> list[list[str]]:
    episode = f"{root.name}.t0.0.0"
    return [
        ["status", root.name],
        ["inspect", root.name],
        ["inspect", root.name, episode],
        ["replay", root.name, episode],
        ["eval", root.name, "--tasks", "4", "--version", "best"],
        ["eval", root.name, "--tasks", "4", "--version", "0", "--recipe", "lookup"],
        ["compare", f"{root.name}@v0", f"{root.name}@best"],
        ["export", root.name, "--out", str(tmp_path / "model")],
    ]
