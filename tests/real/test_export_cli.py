"""`headrace export` and `headrace sft RUN` as processes, on what a run through Ray left behind: out, and in again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import SMALL_RUN, last_json, run

from headrace.actors.rendering import load_renderer
from headrace.trainer.model import load_folder

pytestmark = pytest.mark.timeout(240)
PROMPT = torch.arange(2, 30)[None]


@pytest.fixture(scope="module")
def trained(small_run, tmp_path_factory):
    """A folder of our own in which a run was made by the command line, and its summary."""
    folder = tmp_path_factory.mktemp("work") / "copy"
    shutil.copytree(small_run, folder, symlinks=True)
    return folder, json.loads((folder / "summary.json").read_text())


def answer(folder: Path, *args: str):
    code, out, err = run(folder, *args, "--json", timeout_s=90)
    assert code == 0, err
    return last_json(out)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_folder(folder)(input_ids=PROMPT).logits


def test_the_newest_version_loads_to_the_logits_of_what_was_served(trained):
    folder, summary = trained
    result = answer(folder, "export", "lookup", "--out", "model")
    assert result["version"] == summary["version"] and not result["merged"]
    root = folder / "runs" / summary["run"]
    manifest = json.loads((root / "versions" / f"{summary['version']:06d}.json").read_text())
    assert result["content_hash"] == manifest["content_hash"]
    assert torch.equal(logits(folder / "model"), logits(root / manifest["path"]))
    assert load_renderer(folder / "model").digest == load_renderer(root / manifest["path"]).digest
    assert summary["run"] in (folder / "model" / "README.md").read_text()


def test_the_best_version_is_the_one_with_the_best_evaluation(trained):
    folder, summary = trained
    assert (
        answer(folder, "export", "lookup", "--version", "best", "--out", "best")["version"]
        == summary["best"]["version"]
    )


def test_what_it_did_well_can_be_imitated_and_trained_on(trained):
    """Rejection sampling: the good episodes of a run make the next base model."""
    folder, _ = trained
    result = answer(folder, "sft", "lookup-", "--out", "better", "--filter", "score >= 1", "--steps", "4")
    assert result["steps"] == 4 and result["traces"]["kept"] > 0
    left_out = result["traces"]["left_out"]
    assert left_out["filtered"] > 0 and left_out["split_dev"] == 32  # two evaluations of 16 tasks
    code, out, err = run(folder, "train", "lookup", "model.path=better", *SMALL_RUN, "--dry-run", timeout_s=60)
    assert code == 0 and "better" in out, err
    load_folder(folder / "better")
