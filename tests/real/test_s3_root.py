"""Run roots on S3: killed and resumed, read by every command, and what that costs in requests. The server is moto's."""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from command_line import environment, last_json, run, start
from test_interrupt import given, wait_for
from test_join_cluster import HEAD

from headrace.deploy.run_lock import CLAIM_TERM_S
from headrace.platform.errors import RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.run_root import RunRoot
from headrace.platform.testing.kills.audit import audit

pytestmark = pytest.mark.timeout(600)
WAIT_S, CARRY_S = 200.0, 300.0
REGION = "us-east-1"


class S3:
    """A server on loopback with one bucket, which counts its requests."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of moto's dependencies
            from moto.moto_server.threaded_moto_server import ThreadedMotoServer
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        application = self._server._server.app

        def counting(environ, start_response):
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            return application(environ, start_response)

        self._server._server.app = counting

    def close(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3():
    server = S3()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": server.url,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import fsspec

        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield server
    server.close()


@pytest.fixture
def runs_dir(s3, tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def home():
    """A node's own disk, with a path short enough for the sockets of Ray."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def ray_address(s3):
    """A Ray of somebody else's, whose processes know the way to the bucket."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def node(home: Path) -> dict[str, str]:
    return environment(HOME=str(home), RAY_TMPDIR=str(home))


def steps_done(runs_dir: str) -> int:
    try:
        root = RunRoot.find(runs_dir, "lookup")
        return sum("loss" in record for record in read_metrics(root.metrics))
    except (LookupError, FileNotFoundError):
        return 0


def killed_after(steps: int, home: Path, tmp_path: Path, runs_dir: str, *arguments: str) -> RunRoot:
    """Start a run and kill its process group when it has done `steps` learner steps."""
    process = start(tmp_path, "train", *arguments, f"runs_dir={runs_dir}", "--json", env=node(home))
    try:
        wait_for(lambda: steps_done(runs_dir) >= steps, WAIT_S, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return RunRoot.find(runs_dir, "lookup")


def resumed(root: RunRoot, home: Path, tmp_path: Path, runs_dir: str, *changes: str) -> dict:
    """Resume the run, once the claim of the driver that was killed is over; its summary."""
    arguments = ("train", "--resume", root.name, "--runs-dir", runs_dir, "--json", *changes)
    end_s = time.monotonic() + 2 * CLAIM_TERM_S
    while True:
        code, out, err = run(tmp_path, *arguments, timeout_s=CARRY_S, env=node(home))
        if code == 0:
            return last_json(out)
        assert "is being driven by" in err and time.monotonic() < end_s, err[-3000:]


def assert_exactly_once(root: RunRoot, summary: dict, steps: int) -> None:
    assert summary["learner_steps"] == steps
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0  # P3
    found = audit(root.url, summary)
    assert found.holds, found
    assert found.trained == summary["fates"]["trained"] > 0


def test_the_node_of_a_killed_run_is_lost(lookup_model, runs_dir, home, tmp_path):  # P5, P6, P8
    """Ray and an embedded server, whose file goes with the node: the queue is rebuilt from the bucket."""
    recipe = ("lookup-slow", *given(lookup_model), "learner.batch_groups=4", "learner.checkpoint_every=3")
    root = killed_after(4, home / "a", tmp_path, runs_dir, *recipe, "learner.steps=400")
    assert list((home / "a/.cache/headrace/runs" / root.name / "queue").rglob("*.aof"))
    summary = resumed(root, home / "b", tmp_path, runs_dir, "learner.steps=8")
    assert summary["ledger_epoch"] >= 1, "the server of the other node began without a ledger"
    assert_exactly_once(root, summary, 8)


def test_a_joined_cluster(ray_address, lookup_model, valkey_url, runs_dir, home, tmp_path):
    """Its nodes share nothing but the bucket and the server: the base model, too, comes from there."""
    joining = ("--ray-address", ray_address, "--redis-url", valkey_url, f"runs_dir={runs_dir}")
    recipe = ("lookup", *given(lookup_model), "learner.batch_groups=4", "learner.steps=3")
    code, out, err = run(tmp_path, "train", *recipe, *joining, "--json", timeout_s=CARRY_S, env=node(home))
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert_exactly_once(RunRoot.find(runs_dir, summary["run"]), summary, 3)
    assert not (tmp_path / "s3:").exists()


def test_in_process_and_every_command_that_reads_it(lookup_model, runs_dir, home, tmp_path):
    recipe = ("lookup", *given(lookup_model), "learner.batch_groups=4", "learner.checkpoint_every=2")
    inprocess = ("runtime.kind=inprocess", "learner.steps=400", "learner.lr=1e-9")
    root = killed_after(3, home, tmp_path, runs_dir, *recipe, *inprocess)
    summary = resumed(root, home, tmp_path, runs_dir, "learner.steps=6")
    assert_exactly_once(root, summary, 6)
    for arguments, shown in _commands(root, tmp_path):
        code, out, err = run(tmp_path, *arguments, "--runs-dir", runs_dir, timeout_s=60, env=node(home))
        assert code == 0, err[-2000:]
        assert shown in out


def _commands(root: RunRoot, tmp_path: Path) -> list[tuple[tuple[str, ...], str]]:
    episode = f"{root.name}.t0.0.0"
    return [
        (("status", root.name), "finished, learner step 6 of 6"),
        (("inspect", root.name), "episodes are stored"),
        (("inspect", root.name, episode), "<end>"),
        (("replay", root.name, episode), "no hash differs"),
        (("eval", root.name, "--tasks", "4"), f"Stored as {root.name}@"),
        (("export", root.name, "--out", str(tmp_path / "model")), "model.safetensors"),
    ]


def test_what_a_learner_step_costs(lookup_model, s3, runs_dir, home, tmp_path):
    """Tables and metrics are added to with one request each; nothing is read but the registry's own."""

    def requests(steps: int) -> Counter[tuple[str, str]]:
        before = len(s3.requests)
        recipe = ("lookup", *given(lookup_model), "learner.batch_groups=4", "learner.lr=1e-9", "runtime.kind=inprocess")
        settings = (f"runs_dir={runs_dir}-{steps}", f"learner.steps={steps}", "learner.checkpoint_every=100")
        code, _, err = run(tmp_path, "train", *recipe, *settings, timeout_s=CARRY_S, env=node(home))
        assert code == 0, err[-3000:]
        return Counter((method, _part(path)) for method, path in s3.requests[before:])

    few, many = requests(3), requests(8)
    added = {name: (many[name] - few[name]) / 5 for name in many}
    assert {added["PUT", what] for what in ("receipts", "fates", "metrics")} == {1.0}
    assert added["PUT", "rewards"] == added["PUT", "episodes"] <= 2.0, "one for each delivery"
    assert added["PUT", "status"] <= 1.0
    read = {what for method, what in added if method != "PUT" and added[method, what]}
    assert read <= {"versions", "listing"}, added


def _part(path: str) -> str:
    """What of a run root a request was about."""
    found = re.fullmatch(r"/bucket/[^/]+/[^/]+/([a-z]+).*", path)
    return found[1] if found else "listing"


FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def fetched(s3: S3) -> list[str]:
    """Which of the version's files were read."""
    return sorted(path.rsplit("/", 1)[-1] for method, path in s3.requests if method == "GET" and "f0001-" in path)


class TestTheCacheOfANode:
    @pytest.fixture
    async def registry(self, runs_dir, tmp_path):
        """With version 0, and without a copy of it."""
        ledger = MemoryLedger("run", LedgerLimits(batch_groups=1, max_lag=0), time.time)
        pins = MemoryPins(time.time)
        registry = FileRegistry(runs_dir, ledger, cache_dir=tmp_path / "cache", run="run", pins=pins)
        path, hashes, content = await registry.stage(0, 1, FILES)
        await registry.manifest(
            VersionManifest(
                ref=VersionRef("policy", 0),
                parent=None,
                parent_hash="",
                fence=1,
                kind="full",
                content_hash=content,
                batches=0,
                path=path,
                files=hashes,
            )
        )
        return registry

    async def test_weights_are_read_once(self, registry, s3):
        s3.requests.clear()
        _, first = await registry.open(0)
        assert fetched(s3) == sorted(FILES)
        s3.requests.clear()
        assert (await registry.open(0))[1] == first
        assert fetched(s3) == []
        assert {name: (Path(first) / name).read_bytes() for name in FILES} == FILES

    @pytest.mark.parametrize("harm", [lambda file: file.write_bytes(b"Weights"), Path.unlink])
    async def test_a_copy_that_was_altered_is_fetched_again(self, registry, s3, harm):
        _, folder = await registry.open(0)
        harm(Path(folder) / "model.safetensors")
        s3.requests.clear()
        assert (Path((await registry.open(0))[1]) / "model.safetensors").read_bytes() == b"weights"
        assert fetched(s3) == sorted(FILES)

    async def test_a_version_has_one_manifest(self, registry):  # P8
        with pytest.raises(RegistryError, match="another manifest already"):
            await registry.manifest(msgspec.structs.replace((await registry.latest()), batches=7))
