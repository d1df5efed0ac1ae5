"""Loggers of metrics: what they are given, and that none of them can slow, stop or fail a run."""

import logging
import threading
import time

import pytest
from pydantic import TypeAdapter, ValidationError

from headrace.platform.config.loggers import LoggerConfigs, MlflowConfig, WandbConfig
from headrace.platform.config.secret_references import SecretValues
from headrace.platform.errors import ConfigError
from headrace.platform.observability.loggers import Loggers, build_loggers, check_loggers
from headrace.platform.observability.loggers.packages import require
from headrace.platform.observability.loggers.registry import LOGGERS
from headrace.platform.observability.loggers.scalars import flat, scalars
from headrace.platform.observability.metrics import MetricsFile, read_metrics
from headrace.platform.observability.names import Metric

PATIENCE_S = 10.0


class Recorder:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def start(self, run, config, root):
        self.calls.append(("start", run, config, root))

    def log(self, point):
        self.calls.append(("log", point))

    def finish(self, summary):
        self.calls.append(("finish", summary))

    @property
    def points(self):
        return [call[1] for call in self.calls if call[0] == "log"]


class Failing(Recorder):
    """Raises wherever it is told to."""

    def __init__(self, *where, message="the service is down"):
        super().__init__()
        self._where, self._message = where, message

    def start(self, run, config, root):
        self._call("start")

    def log(self, point):
        self._call("log")

    def finish(self, summary):
        self._call("finish")

    def _call(self, name):
        self.calls.append((name,))
        if name in self._where:
            raise ConnectionError(self._message)


class Gated(Recorder):
    """Waits in `log` until it is let go: slow when it is, hanging when it is not."""

    def __init__(self):
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()

    def log(self, point):
        self.entered.set()
        self.gate.wait(PATIENCE_S)
        super().log(point)


@pytest.fixture
def make(tmp_path):
    """Builds started `Loggers` on a file of the test's own, with a clock that counts."""
    times = iter(range(100, 10_000))

    def build(capacity=100, secrets=None, **loggers):
        file = MetricsFile(str(tmp_path / "metrics.jsonl"), lambda: 0.0, strict=True)
        made = Loggers(file, loggers, lambda: float(next(times)), secrets, capacity=capacity)
        made.start("run-1", {"seed": 1}, str(tmp_path))
        return made

    return build


def written(tmp_path):
    return list(read_metrics(str(tmp_path / "metrics.jsonl")))


def test_scalars_are_the_finite_numbers_by_the_names_of_the_table():
    record = {
        Metric.TIME_S: 7.0,
        Metric.STAGE: "rl",
        Metric.LOSS: 0.5,
        Metric.SUCCESS: float("nan"),
        Metric.KL: float("inf"),
        Metric.GRAD_NORM: None,
        Metric.LAG: {0: 3, "1": 2},
        Metric.FATES: {"trained": 4, "dropped:late": 1},
        Metric.PUTS_REFUSED: {},
        "no_such_metric": 1.0,
    }
    assert scalars(record) == {"loss": 0.5, "lag/0": 3, "lag/1": 2, "fates/trained": 4, "fates/dropped:late": 1}


def test_configurations_flatten_to_dotted_names():
    tree = {"seed": 1, "learner": {"betas": [0.9, 0.95]}, "environments": [{"name": "a", "args": {}}], "sft": None}
    assert flat(tree) == {
        "seed": 1,
        "learner.betas": [0.9, 0.95],
        "environments.0.name": "a",
        "environments.0.args": {},
        "sft": None,
    }


def test_a_run_reaches_the_file_and_every_logger_alike(make, tmp_path):
    first, second = Recorder(), Recorder()
    loggers = make(first=first, second=second)
    loggers.append({Metric.STAGE: "rl", Metric.LEARNER_STEP: 1, Metric.LAG: {"0": 2}})
    loggers.append({Metric.STAGE: "words only"})
    loggers.finish({"success_after": 0.9})
    loggers.close()
    loggers.close()
    assert written(tmp_path) == [
        {"time_s": 100.0, "stage": "rl", "learner_step": 1, "lag": {"0": 2}},
        {"time_s": 101.0, "stage": "words only"},
    ]
    for logger in (first, second):
        assert [call[0] for call in logger.calls] == ["start", "log", "finish"]
        assert logger.calls[0][1:] == ("run-1", {"seed": 1}, str(tmp_path))
        assert logger.calls[-1][1] == {"success_after": 0.9}
        (point,) = logger.points
        assert (point.values, point.step, point.time_s) == ({"learner_step": 1, "lag/0": 2}, 1, 100.0)
    assert loggers.reports()["first"] == {"written": 1, "dropped": 0, "failed": 0, "cause": ""}


def test_what_is_written_after_close_still_reaches_the_file(make, tmp_path):
    recorder = Recorder()
    loggers = make(recorder=recorder)
    loggers.close()
    loggers.append({Metric.LOSS: 1.0})
    assert [record["loss"] for record in written(tmp_path)] == [1.0]
    assert recorder.points == []


def test_steps_follow_the_learner_and_supervised_stages_have_their_own(make):
    recorder = Recorder()
    loggers = make(recorder=recorder)
    records = [
        {Metric.SFT_STEP: 25, Metric.SFT_LOSS: 2.0},
        {Metric.SFT_SUCCESS: 0.3, Metric.EVAL_SUCCESS: 0.3},
        {Metric.LEARNER_STEP: 1},
        {Metric.LEARNER_STEP: 2},
        {Metric.LEARNER_STEP: 1, Metric.EVAL_SUCCESS: 0.7},
        {Metric.EVAL_SUCCESS: 0.9},
    ]
    for record in records:
        loggers.append(record)
    loggers.close()
    assert [(point.axis.value, point.step) for point in recorder.points] == [
        ("sft_step", 25),
        ("learner_step", 0),
        ("learner_step", 1),
        ("learner_step", 2),
        ("learner_step", 1),
        ("learner_step", 2),
    ], "a late evaluation stands at its own step, and the next record at the newest"


def test_a_logger_that_raises_is_told_of_once_and_counted(make, tmp_path, caplog):
    failing, healthy = Failing("log", "finish"), Recorder()
    loggers = make(failing=failing, healthy=healthy)
    for step in (1, 2, 3):
        loggers.append({Metric.LEARNER_STEP: step})
    with caplog.at_level(logging.WARNING):
        loggers.close()
    assert len(written(tmp_path)) == 3 and len(healthy.points) == 3
    report = loggers.reports()["failing"]
    assert report == {
        "written": 0,
        "dropped": 0,
        "failed": 3,
        "cause": "log failed: ConnectionError: the service is down",
    }
    told = [record.getMessage() for record in caplog.records if "failing" in record.getMessage()]
    assert len(told) <= 1
    assert [call[0] for call in failing.calls] == ["start", "log", "log", "log", "finish"], "it may have recovered"


def test_a_logger_that_does_not_start_is_asked_nothing_more(make):
    failing = Failing("start")
    loggers = make(failing=failing)
    loggers.append({Metric.LEARNER_STEP: 1})
    loggers.close()
    assert [call[0] for call in failing.calls] == ["start"]
    assert loggers.reports()["failing"]["failed"] == 1


def test_no_cause_holds_a_secret(make):
    secrets = SecretValues()
    secrets.add("hunter2")
    loggers = make(secrets=secrets, failing=Failing("start", message="https://me:hunter2@host refused"))
    loggers.close()
    assert loggers.reports()["failing"]["cause"] == "start failed: ConnectionError: https://me:[secret]@host refused"


def test_a_logger_that_hangs_neither_slows_the_run_nor_holds_the_end(make, tmp_path):
    hanging, healthy = Gated(), Recorder()
    loggers = make(capacity=2, hanging=hanging, healthy=healthy)
    try:
        loggers.append({Metric.LEARNER_STEP: 0})
        assert hanging.entered.wait(PATIENCE_S)
        for step in range(1, 6):
            loggers.append({Metric.LEARNER_STEP: step})
        began = time.monotonic()
        loggers.close(deadline_s=0.2)
        assert time.monotonic() - began < PATIENCE_S / 2
    finally:
        hanging.gate.set()
    assert len(written(tmp_path)) == 6
    report = loggers.reports()["hanging"]
    assert report["dropped"] == 3, "two may wait beside the one that hangs"
    assert "queue of 2" in report["cause"]
    assert healthy.calls[-1][0] == "finish", "the deadline is shared, and one that hangs does not use up all of it"


def test_a_slow_logger_is_waited_for_at_the_end(make):
    slow = Gated()
    loggers = make(slow=slow)
    for step in range(5):
        loggers.append({Metric.LEARNER_STEP: step})
    assert slow.entered.wait(PATIENCE_S)
    assert slow.points == [], "append returned before the logger did"
    threading.Timer(0.05, slow.gate.set).start()
    loggers.finish({"done": True})
    loggers.close(PATIENCE_S)
    assert [point.step for point in slow.points] == [0, 1, 2, 3, 4]
    assert slow.calls[-1] == ("finish", {"done": True})


class TestConfiguration:
    def read(self, *configs):
        return TypeAdapter(LoggerConfigs).validate_python(configs)

    def test_every_kind_can_be_built_without_its_package(self):
        configs = self.read({"kind": "wandb"}, {"kind": "tensorboard"}, {"kind": "mlflow"})
        assert list(build_loggers(configs, SecretValues())) == [config.kind for config in configs]
        assert {config.kind for config in configs} == set(LOGGERS)

    def test_each_kind_once(self):
        with pytest.raises(ValidationError, match="twice: mlflow"):
            self.read({"kind": "mlflow"}, {"kind": "mlflow"})

    def test_an_unknown_kind_names_the_known_ones(self):
        with pytest.raises(ValidationError, match="'wandb', 'tensorboard', 'mlflow'"):
            self.read({"kind": "wndb"})

    def test_a_key_is_a_reference(self):
        assert WandbConfig(kind="wandb", api_key="${env:KEY}").model_dump()["api_key"] == "${env:KEY}"
        with pytest.raises(ValidationError, match="write a reference"):
            WandbConfig(kind="wandb", api_key="hunter2")


class TestChecks:
    def test_a_missing_package_names_its_command(self):
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[no_such_package\]'"):
            require("no_such_package")

    def test_a_folder_of_that_name_is_no_package(self, tmp_path, monkeypatch):
        (tmp_path / "no_such_package").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match="not installed"):
            require("no_such_package")

    def test_a_missing_secret_is_named(self):
        with pytest.raises(ConfigError, match=r"\$\{env:NONE\}"):
            check_loggers([WandbConfig(kind="wandb", api_key="${env:NONE}")], env={})
        with pytest.raises(ConfigError, match=r"\$\{env:NONE\}"):
            check_loggers([MlflowConfig(kind="mlflow", tracking_uri="https://u:${env:NONE}@host")], env={})

    def test_online_needs_a_key(self, tmp_path):
        online = [WandbConfig(kind="wandb", mode="online")]
        nothing = {"NETRC": str(tmp_path / "netrc")}
        with pytest.raises(ConfigError, match="WANDB_API_KEY"):
            check_loggers(online, env=nothing)
        check_loggers(online, env={**nothing, "WANDB_API_KEY": "k"})
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
        check_loggers(online, env=nothing)
