"""`make gpu-check` on a machine without a GPU: the refusal, the parts' failures, the file, and the parts in small."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.platform.config import LearnerConfig
from headrace.platform.errors import ConfigError
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import pack
from headrace.trainer.devices import learner_device, on_device
from headrace.trainer.packing import pack_tokens

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
conductor, reports, scales = (import_module(f"scripts.gpu_check.{name}") for name in ("conductor", "report", "scale"))
PARTS = tuple(conductor.DEADLINES_S)
TELL = """
import time
from scripts.gpu_check.report import Report
report = Report()
report.add(tokens_per_s=12.34567)
"""


def part(code: str) -> list[str]:
    """A part that runs `code`."""
    return [sys.executable, "-c", TELL + code]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_one_sentence_and_status_2(no_gpu, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert import_module("scripts.gpu_check.__main__").main() == 2
    (sentence,) = capsys.readouterr().out.splitlines()
    assert "needs an NVIDIA GPU with 24 GB" in sentence and "docs/gpu.md" in sentence
    assert sentence.endswith("finds no GPU here.")


def test_everything_fits_into_eight_minutes_whatever_the_parts_take(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert conductor.TOTAL_S < 480
    monkeypatch.setattr(conductor, "TOTAL_S", 0.0)
    assert conductor.conduct(list(PARTS), {}, rehearse=True, out=None) == 1
    assert capsys.readouterr().out.count("no time was left for it") == len(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_can_be_imported_here(name: str) -> None:
    assert callable(import_module(f"scripts.gpu_check.{name}").check)


class TestAPart:
    def test_what_holds_is_ok(self) -> None:
        result = conductor.run(part("report.limit('gap', 0.01, 0.05)"), 60.0)
        assert (result["status"], result["why"]) == ("ok", "")
        assert result["figures"] == {"tokens_per_s": 12.35, "gap": 0.01, "gap_limit": 0.05}

    @pytest.mark.parametrize("gap", ["0.0625", "float('nan')"])
    def test_what_is_above_its_limit_fails_and_keeps_its_figures(self, gap: str) -> None:
        result = conductor.run(part(f"report.limit('gap', {gap}, 0.05)"), 60.0)
        assert result["status"] == "failed"
        assert result["why"].startswith("gap is ") and result["why"].endswith(", above 0.05")
        assert result["figures"]["tokens_per_s"] == 12.35

    def test_a_crash_keeps_the_figures_before_it(self) -> None:
        result = conductor.run(part("import os; os.kill(os.getpid(), 9)"), 60.0)
        assert (result["status"], result["why"]) == ("failed", "it ended with -9")
        assert result["figures"] == {"tokens_per_s": 12.35}

    def test_one_that_hangs_is_ended_with_all_that_it_started(self, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        result = conductor.run(["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"], 1.0)
        assert (result["status"], result["why"]) == ("failed", "it took over 1 s")
        state = Path(f"/proc/{pid.read_text()}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"

    def test_where_there_is_nothing_to_check_nothing_failed(self) -> None:
        result = conductor.run(part("report.nothing('not written: samples are padded')"), 60.0)
        assert (result["status"], result["why"]) == ("nothing", "not written: samples are padded")
        assert "nothing to check" in conductor.line("attention", result)

    def test_silence_is_a_failure(self) -> None:
        result = conductor.run([sys.executable, "-c", "print('hello')"], 60.0)
        assert (result["status"], result["why"]) == ("failed", "it said nothing")

    def test_without_time_left_it_is_not_started(self) -> None:
        result = conductor.run(["/nonexistent"], 0.0)
        assert (result["status"], result["why"]) == ("failed", "no time was left for it")


def test_the_file_has_the_machine_and_each_part_and_one_failure_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    code = {"generation": "", "zero": "raise SystemExit(3)"}
    monkeypatch.setattr(conductor, "command", lambda name, *, rehearse: part(code[name]))
    out = tmp_path / "results" / "gpu.json"
    assert conductor.conduct(["generation", "zero"], {"torch": "2"}, rehearse=False, out=out) == 1
    assert conductor.conduct(["generation"], {}, rehearse=False, out=tmp_path / "other.json") == 0
    content = json.loads(out.read_text())
    assert set(content) == {"date", "rehearsal", "seconds", "machine", "parts"}
    assert content["machine"] == {"torch": "2"} and content["rehearsal"] is False
    assert {name: result["status"] for name, result in content["parts"].items()} == {
        "generation": "ok",
        "zero": "failed",
    }
    assert all(set(result) == {"status", "why", "seconds", "figures"} for result in content["parts"].values())
    assert "zero       FAILED in" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["attention", "learner"])
def test_a_part_runs_in_small_on_the_cpu(name: str) -> None:
    report = reports.Report()
    import_module(f"scripts.gpu_check.{name}").check(scales.REHEARSAL, report)
    assert report.faults == [] and report.absent == ""
    numbers = [value for value in report.figures.values() if isinstance(value, float)]
    assert np.isfinite(numbers).all()
    if name == "learner":
        assert report.figures["tokens"] == sum(each.length for each in scales.episodes(scales.REHEARSAL))
        assert report.figures["tokens_per_s_float32"] > 0


def test_operations_of_packed_and_padded_samples_by_hand() -> None:
    learner = import_module("scripts.gpu_check.learner")
    shape = scales.Shape(layers=1, width=2, heads=1, inner=3, vocabulary=5)
    (sample, *_) = scales.episodes(scales.REHEARSAL)
    length, chosen = sample.length, sample.loss_tokens
    (padded,) = pack([sample], 10_000)
    (packed,) = pack_tokens([sample], 10_000, True)
    head = 2 * chosen * 2 * 5
    per_token = 2 * (4 * 2 * 2 + 3 * 2 * 3)
    pairs = (length - 1) ** 2 / 2
    assert learner.operations(shape, padded) == 3 * (per_token * (length - 1) + 4 * 2 * pairs + head)
    assert learner.operations(shape, packed) == 3 * (per_token * length + 4 * 2 * learner.seen(packed) + head)
    assert learner.seen(packed) == length**2 / 2


class TestDevices:
    def test_without_a_gpu_auto_is_the_cpu_and_a_gpu_is_refused(self, no_gpu) -> None:
        assert learner_device("auto") == learner_device("cpu") == torch.device("cpu")
        with pytest.raises(ConfigError, match=r"learner\.device=cuda needs a GPU .* resources\.learner\.gpus=1"):
            learner_device("cuda")

    def test_the_torch_backend_is_where_its_configuration_says(self, no_gpu) -> None:
        model = scales.build(scales.REHEARSAL.trained, "cpu", seed=0)
        with pytest.raises(ConfigError, match=r"learner\.device=cuda needs a GPU"):
            TorchBackend(model, LearnerConfig(device="cuda"))
        backend = TorchBackend(model, LearnerConfig(device="auto"))
        assert {each.device.type for each in backend.model.parameters()} == {"cpu"}

    @pytest.mark.parametrize("packed", [False, True])
    def test_every_tensor_of_a_microbatch_goes_to_the_device(self, packed: bool) -> None:
        samples = scales.episodes(scales.REHEARSAL)
        (micro, *_) = pack_tokens(samples, 10_000, True) if packed else pack(samples, 10_000)
        assert on_device(micro, torch.device("cpu")) is micro
        moved = on_device(micro, torch.device("meta"))
        names = [name for name in type(micro).__dataclass_fields__ if isinstance(getattr(micro, name), torch.Tensor)]
        assert len(names) >= 6 and {getattr(moved, name).device.type for name in names} == {"meta"}
        assert moved.rows == micro.rows
        assert [getattr(moved, name).shape for name in names] == [getattr(micro, name).shape for name in names]
