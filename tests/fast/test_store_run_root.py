import json
import math

import pytest

from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.store.run_root import FOLDERS, RunRoot


def test_create_makes_the_layout_once(tmp_path):
    root = RunRoot.create(str(tmp_path), "lookup-1f3a", "name: lookup\n")
    assert root.name == "lookup-1f3a"
    assert {path.name for path in (tmp_path / "lookup-1f3a").iterdir()} == {*FOLDERS, "config.yaml"}
    assert root.read_config() == "name: lookup\n"
    assert root.local("queue").is_dir()
    with pytest.raises(ConfigError, match="exists already"):
        RunRoot.create(str(tmp_path), "lookup-1f3a", "")


def test_find_by_unique_prefix_or_path(tmp_path):
    for name in ("lookup-1f3a", "lookup-1f", "other-9"):
        RunRoot.create(str(tmp_path), name, "")
    (tmp_path / "lookup-1fnot-a-run").mkdir()
    runs = str(tmp_path)
    assert RunRoot.find(runs, "oth").name == "other-9"
    assert RunRoot.find(runs, "lookup-1f").name == "lookup-1f"
    assert RunRoot.find(runs, "lookup-1f3").name == "lookup-1f3a"
    assert RunRoot.find("elsewhere", str(tmp_path / "other-9")).name == "other-9"
    with pytest.raises(NotFound, match="fits 2 runs: lookup-1f, lookup-1f3a"):
        RunRoot.find(runs, "look")
    with pytest.raises(NotFound, match=r"no run 'lokup-1f'.*; there are lookup-1f"):
        RunRoot.find(runs, "lokup-1f")
    with pytest.raises(NotFound, match="it holds no runs"):
        RunRoot.find(str(tmp_path / "empty"), "x")
    with pytest.raises(NotFound, match=r"no config\.yaml"):
        RunRoot.find(runs, str(tmp_path / "lookup-1fnot-a-run"))


def test_summary_is_replaced_whole(tmp_path):
    root = RunRoot.create(str(tmp_path), "r", "")
    with pytest.raises(NotFound, match="no summary"):
        root.read_summary()
    root.write_summary({"run": "r", "seconds": 1.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        root.write_summary({"seconds": math.nan})
    assert root.read_summary() == {"run": "r", "seconds": 1.5}
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["run"] == "r"


def test_a_root_that_is_not_on_a_disk():
    root = RunRoot.create("memory://runs-of-test", "m", "a: 1\n")
    root.write_summary({"run": "m"})
    again = RunRoot.find("memory://runs-of-test", "m")
    assert again.read_summary() == {"run": "m"}
    assert again.metrics == "memory:///runs-of-test/m/metrics.jsonl"
    with pytest.raises(ConfigError, match="must lie on a local disk"):
        again.local("queue")
