"""The pages are built strictly, and the code that they show runs.

A fenced block with a title is a file and is written (one of examples/ must be as it is there); `python` without one is
executed; `yaml` without one must be part of a recipe; of `sh` every `headrace` command is run in this process (`train`
as a dry run), and every `make` target must exist. Blocks of a page share one folder. Words in capitals stand for what
is provided: a finished run, an episode of it, a model.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import call_main
from run_kit import RECIPES, run_inprocess, small_config, stored

from headrace.deploy.base_model import prepare_base_model
from headrace.platform.config.load import load_recipe
from headrace.platform.records.status import Purpose

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
_BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
_PASSED_OVER = ("make ", "pip install ", "cd ", "python -m venv", "source ", "ray job submit", "tensorboard ", "#")
SHOWN = ("", "text", "console", "json")


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text())]


@pytest.fixture(scope="module")
def finished_run(lookup_model, tmp_path_factory) -> Path:
    """A folder whose `runs/` holds one finished run."""
    folder = tmp_path_factory.mktemp("docs")
    run_inprocess(small_config(lookup_model, folder / "runs", "learner.checkpoint_every=1"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """An untrained model with room for long contexts and the tokenizer of the finished run."""
    config = load_recipe("lookup", ["sft=null", "model.tiny_llama.max_positions=1024"], RECIPES)
    return prepare_base_model(config, lambda step: None, tmp_path_factory.mktemp("model") / "untrained").path


@pytest.fixture
def placeholders(finished_run: Path, model: Path, tmp_path: Path) -> dict[str, str]:
    shutil.copytree(finished_run / "runs", tmp_path / "runs")
    (root,) = (tmp_path / "runs").iterdir()
    from headrace.platform.store.run_root import RunRoot

    episodes = [e for e in stored(RunRoot(str(root))) if e.purpose is Purpose.TRAIN]
    longest = max(episodes, key=lambda each: len(each.views))  # one that can be branched
    return {"RUN": root.name, "EPISODE": longest.episode_id, "MODEL": str(model)}


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(Path(sys.executable).parent / "mkdocs"), "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "quickstart" / "index.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(
    page: Path, placeholders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for number, block in enumerate(blocks(page), start=1):
        where = f"{page.name}, block {number}"
        if block.title.startswith("examples/"):
            assert block.code == (ROOT / block.title).read_text(), f"{where} is not {block.title} as it is"
        elif block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, where, "exec"), {"__name__": "docs"})
        elif block.language == "yaml":
            part = tmp_path / "part.yaml"
            part.write_text(f"extends: lookup\n{block.code}")
            load_recipe(str(part), [], RECIPES)
        elif block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                run_line(line, placeholders, where, monkeypatch, capsys)
        else:
            assert block.language in SHOWN, f"{where}: what is {block.language}?"


def run_line(line: str, placeholders: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    words = [
        re.sub(r"\b(RUN|EPISODE|MODEL)\b", lambda m: placeholders[m[0]], w) for w in shlex.split(line, comments=True)
    ]
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert all(target in targets for target in words[1:] if "=" not in target), f"{where}: {line}"
        return
    if line.startswith(_PASSED_OVER):
        return
    assert words[0] in ("headrace", ".venv/bin/headrace"), f"{where}: {line!r} is not run by any test"
    if words[1] == "train" and "--dry-run" not in words:
        words.append("--dry-run")
    code = call_main(monkeypatch, *words[1:])
    assert code == 0, f"{where}: {line!r} ended with {code}: {capsys.readouterr().err}"
