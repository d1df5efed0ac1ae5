import json
import logging

import pytest
from matplotlib.image import imread

from headrace.platform.config.secret_references import SecretValues
from headrace.platform.observability.figure import learning_curve
from headrace.platform.observability.logs import close_log, open_log
from headrace.platform.observability.metrics import MetricsFile, read_metrics
from headrace.platform.observability.names import Kind, Metric


def test_every_metric_is_described():
    assert len({metric.value for metric in Metric}) == len(Metric)
    for metric in Metric:
        assert metric == metric.value == metric.name.lower()
        assert metric.help
        assert isinstance(metric.kind, Kind)
    assert Metric("lag") is Metric.LAG


def test_records_are_appended_with_their_time(tmp_path):
    times = iter((10.0, 11.5))
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = MetricsFile(str(path), lambda: next(times), strict=True)
    metrics.append({Metric.LEARNER_STEP: 1, Metric.LAG: {0: 3, 1: 2}, Metric.LOSS: float("nan")})
    metrics.append({Metric.STAGE: "rl"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"time_s": 10.0, "learner_step": 1, "lag": {"0": 3, "1": 2}, "loss": None},
        {"time_s": 11.5, "stage": "rl"},
    ]
    path.write_text(path.read_text() + '{"torn')
    assert len(list(read_metrics(str(path)))) == 2


def test_unknown_names_are_an_error_in_tests_and_counted_elsewhere(tmp_path):
    strict = MetricsFile(str(tmp_path / "m.jsonl"), lambda: 0.0, strict=True)
    with pytest.raises(ValueError, match="'succes' is not a metric"):
        strict.append({"succes": 1.0})
    lenient = MetricsFile(str(tmp_path / "m.jsonl"), lambda: 0.0)
    lenient.append({"succes": 1.0, Metric.SUCCESS: 0.5})
    assert lenient.unknown_names == 1
    assert list(read_metrics(str(tmp_path / "m.jsonl"))) == [{"time_s": 0.0, "success": 0.5}]


def test_a_write_error_is_counted_never_raised(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    metrics = MetricsFile(str(tmp_path / "file" / "metrics.jsonl"), lambda: 0.0)
    metrics.append({Metric.LOSS: 1.0})
    metrics.append({Metric.FATES: {"trained": object()}})
    assert metrics.write_errors == 2


def test_learning_curve_is_a_picture(tmp_path):
    metrics = MetricsFile(str(tmp_path / "metrics.jsonl"), lambda: 0.0, strict=True)
    metrics.append({Metric.SFT_SUCCESS: 0.33})
    for step in range(40):
        success = 0.33 + 0.62 * (1 - 0.9**step)
        metrics.append({Metric.LEARNER_STEP: step, Metric.SUCCESS: success, Metric.LAG: {0: 40, 1: 70, 2: 18}})
    metrics.append({Metric.LEARNER_STEP: 40, Metric.EVAL_SCORE: 0.96})
    out = tmp_path / "figures" / "learning_curve.png"
    learning_curve(str(tmp_path / "metrics.jsonl"), str(out), "lookup")
    assert imread(out).shape[:2] == (900, 1200)


def test_learning_curve_of_a_run_that_has_just_begun(tmp_path):
    MetricsFile(str(tmp_path / "m.jsonl"), lambda: 0.0).append({Metric.STAGE: "copy"})
    learning_curve(str(tmp_path / "m.jsonl"), str(tmp_path / "f.png"))
    assert (tmp_path / "f.png").stat().st_size > 1000


@pytest.fixture
def log(tmp_path):
    secrets = SecretValues()
    handler = open_log(tmp_path / "logs", "worker-0", secrets)
    yield secrets, tmp_path / "logs" / "worker-0.log"
    close_log(handler)


def test_log_lines_are_plain_and_carry_fields(log):
    _, path = log
    logging.getLogger("headrace.actors").info("group %d\nis ready", 3, extra={"fields": {"group": 3, "lag": 1}})
    line = path.read_text()
    assert line.endswith(r" INFO headrace.actors group 3\nis ready group=3 lag=1" + "\n")
    assert line[:4].isdigit()
    assert line.split(" ")[0].endswith("Z")


def test_secrets_never_reach_a_log(log):
    secrets, path = log
    logger = logging.getLogger("headrace")
    secrets.add("s3cret/word")
    logger.warning("connecting to redis://:s3cret%2Fword@host", extra={"fields": {"password": "s3cret/word"}})
    try:
        raise ValueError("bad password s3cret/word")
    except ValueError:
        logger.exception("failed")
    text = path.read_text()
    assert "ValueError: bad password [secret]" in text
    assert "s3cret" not in text


def test_a_closed_log_takes_nothing_more(tmp_path):
    handler = open_log(tmp_path, "a", SecretValues())
    close_log(handler)
    logging.getLogger("headrace").warning("after")
    assert (tmp_path / "a.log").read_text() == ""
