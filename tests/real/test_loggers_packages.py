"""W&B, TensorBoard and MLflow as they are installed, offline: what they stored is what `metrics.jsonl` holds.

The run is played by a process of its own, with a home of its own and warnings as errors, so that what the packages
leave behind can be seen.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from headrace.platform.observability.metrics import read_metrics

PLAY = """
import json, sys, time
from importlib import import_module
import psutil
from pydantic import TypeAdapter
from headrace.platform.config.loggers import LoggerConfigs
from headrace.platform.config.secret_references import SecretValues
from headrace.platform.observability.loggers import Loggers, build_loggers, check_loggers
from headrace.platform.observability.metrics import MetricsFile
from headrace.platform.observability.names import Metric

root, configs, deadline_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
configs = TypeAdapter(LoggerConfigs).validate_python(configs)
check_loggers(configs)
for module in sys.argv[4:]:
    import_module(module)
secrets = SecretValues()
file = MetricsFile(root + "/metrics.jsonl", time.time, strict=True)
loggers = Loggers(file, build_loggers(configs, secrets), time.time, secrets)
queue = {"redis_url": "redis://:${env:MARKED_SECRET}@host"}
recipe = {"seed": 7, "queue": queue, "environments": [{"args": {"a b?": 1}}]}
loggers.start("run-1", recipe, root)
loggers.append({Metric.STAGE: "sft format", Metric.SFT_STEP: 25, Metric.SFT_LOSS: 2.25})
loggers.append({Metric.STAGE: "sft", Metric.SFT_SUCCESS: 0.25, Metric.EVAL_SUCCESS: 0.25})
for step in (1, 2, 3):
    loggers.append({Metric.STAGE: "rl", Metric.LEARNER_STEP: step, Metric.LOSS: 1 / step, Metric.KL: float("nan"),
                    Metric.LAG: {"0": 3, "1": step}, Metric.FATES: {"trained": step, "dropped:zero_variance": 2}})
loggers.append({Metric.STAGE: "eval", Metric.EVAL_SUCCESS: 0.875})
loggers.finish({"run": "run-1", "success_after": 0.875, "fates": {"trained": 3}})
loggers.close(deadline_s)
print(json.dumps({"reports": loggers.reports(), "children": [p.name() for p in psutil.Process().children()],
                  "torch": "torch" in sys.modules}))
"""
SFT_AXIS = {"sft_step", "sft_loss"}
MARKED = "marked-0123456789-0123456789-0123456789-0"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "run-1"
    folder.mkdir()
    return folder


def play(root, *configs, deadline_s=60.0, imported=(), **env):
    """Play the run above, with modules `imported` before; what its process said at the end."""
    home = root.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAY, str(root), json.dumps(configs), str(deadline_s), *imported],
        env={**kept, "HOME": str(home), "MARKED_SECRET": MARKED, **env},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr, "stdout": done.stdout}


def expected(root):
    """The series of `metrics.jsonl`: points (step, value) by name, steps as docs say."""
    series, learner_step = defaultdict(list), 0
    for record in read_metrics(str(root / "metrics.jsonl")):
        learner_step = record.get("learner_step", learner_step)
        step = record.get("sft_step", learner_step)
        for name, value in record.items():
            if name in ("time_s", "stage"):
                continue
            for label, each in value.items() if isinstance(value, dict) else [(None, value)]:
                if each is not None:
                    series[name if label is None else f"{name}/{label}"].append((step, each))
    assert len(series) == 10 and len(series["loss"]) == 3 and "kl" not in series
    return dict(series)


def times(root):
    return [record["time_s"] for record in read_metrics(str(root / "metrics.jsonl"))]


def check_clean(root, said, kind):
    """Nothing failed, nothing runs on, no secret is anywhere, and no file lies outside of run root and home."""
    assert said["reports"] == {kind: {"written": 6, "dropped": 0, "failed": 0, "cause": ""}}
    assert said["children"] == [] and said["stderr"] == "" and len(said["stdout"].splitlines()) == 1
    assert {path.name for path in root.iterdir()} == {"metrics.jsonl", "logs"}
    assert [path.name for path in (root / "logs").iterdir()] == [kind]
    for path in root.parent.rglob("*"):
        assert not path.is_file() or MARKED.encode() not in path.read_bytes(), path


def test_tensorboard(root):
    said = play(root, {"kind": "tensorboard"})
    check_clean(root, said, "tensorboard")
    assert said["torch"] is False
    assert list((root.parent / "home").iterdir()) == []

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "logs/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    series = expected(root)
    assert set(events.Tags()["scalars"]) == set(series)
    for name, points in series.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in points
        ]
    assert [event.wall_time for event in events.Scalars("loss")] == times(root)[2:5]
    (text,) = events.Tensors("config")
    assert "${env:MARKED_SECRET}" in text.tensor_proto.string_val[0].decode()


def test_mlflow(root, monkeypatch):
    said = play(root, {"kind": "mlflow", "experiment": "lookup"})
    check_clean(root, said, "mlflow")
    assert list((root.parent / "home").iterdir()) == []

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(root / "logs/mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("lookup").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-1", "FINISHED")
    series = expected(root)
    assert set(run.data.metrics) == set(series)
    for name, points in series.items():
        assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)] == points
    milliseconds = [metric.timestamp for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert milliseconds == [int(time_s * 1000) for time_s in times(root)[2:5]]
    assert run.data.params["seed"] == "7" and run.data.params["environments.0.args.a b_"] == "1"
    assert run.data.params["queue.redis_url"] == "redis://:${env:MARKED_SECRET}@host"
    assert run.data.tags["success_after"] == "0.875" and run.data.tags["fates.trained"] == "3"


def test_wandb(root):
    config = {"kind": "wandb", "project": "lookup", "api_key": "${env:MARKED_SECRET}"}
    said = play(root, config)
    check_clean(root, said, "wandb")
    home = root.parent / "home"
    assert [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("HOME") == str(home)] == []
    assert [str(path.relative_to(home)) for path in home.glob("*/*")] == [".cache/wandb"], "W&B's own logs only"

    (file,) = (root / "logs/wandb").glob("offline-run-*/run-run-1.wandb")
    records = wandb_records(file)
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    series = defaultdict(list)
    for row in rows:
        step = row["sft_step"] if set(row) >= SFT_AXIS else row["learner_step"]
        for name, value in row.items():
            if not name.startswith("_"):
                series[name].append((step, value))
    wanted = expected(root)
    assert {name: points for name, points in series.items() if name != "learner_step"} == {
        name: points for name, points in wanted.items() if name != "learner_step"
    }
    assert series["learner_step"] == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 3)], "every row off the SFT axis has one"
    assert [row["_step"] for row in rows] == list(range(6)), "W&B's own step never falls"
    assert [row["_timestamp"] for row in rows] == times(root)

    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.display_name, run.project) == ("run-1", "run-1", "lookup")
    stored = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert stored["queue"] == {"redis_url": "redis://:${env:MARKED_SECRET}@host"}
    axes = {metric.name or metric.glob_name: metric.step_metric for metric in kind_of(records, "metric")}
    assert axes["*"] == "learner_step" and axes["sft_loss"] == "sft_step"
    summary = {item.key: item.value_json for each in kind_of(records, "summary") for item in each.update}
    assert summary["success_after"] == "0.875"


def kind_of(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def wandb_records(file: Path):
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes, one protobuf message each."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    block, header = 32768, 7
    first_or_whole, last_or_whole = (1, 2), (1, 4)
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + header])
        payload = data[at + header : at + header + length]
        parts = payload if kind in first_or_whole else parts + payload
        if kind in last_or_whole:
            record = Record()
            record.ParseFromString(parts)
            records.append(record)
        at += header + length
    return records


def test_all_three_at_once(root):
    said = play(root, {"kind": "wandb"}, {"kind": "tensorboard"}, {"kind": "mlflow"})
    assert {kind: report["written"] for kind, report in said["reports"].items()} == {
        "wandb": 6,
        "tensorboard": 6,
        "mlflow": 6,
    }
    assert said["children"] == []


def test_a_service_that_hangs_costs_the_run_its_deadline_and_no_more(root):
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=lambda: taken.append(server.accept()[0]), daemon=True).start()
        said = play(root, {"kind": "mlflow", "tracking_uri": url}, deadline_s=2.0, imported=["mlflow.tracking"])
    for connection in taken:
        connection.close()
    assert taken, "the service was called"
    assert said["reports"]["mlflow"]["cause"].startswith("it was busy with start when time was up")
    assert len(times(root)) == 6


def test_a_service_that_refuses_is_named(root):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    said = play(root, {"kind": "mlflow", "tracking_uri": url}, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    report = said["reports"]["mlflow"]
    assert report["failed"] == 6 and "refused" in report["cause"]
    assert said["stderr"].count("the logger mlflow") == 1
    assert len(times(root)) == 6
