"""Stages over data: in a recipe, and as `headrace sft DATA` from chats and from a run's own episodes."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from command_line import call_main
from run_kit import RECIPES, run_inprocess, small_config

from headrace.actors.environments.lookup import LookupTasks
from headrace.actors.environments.registry import ENVIRONMENTS
from headrace.actors.rendering import load_renderer
from headrace.deploy.base_model import SftStep, cache_folder, prepare_base_model
from headrace.deploy.finetune import FinetuneSettings, finetune
from headrace.deploy.vocabulary import vocabulary_files
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, NotFound, RunFailed
from headrace.platform.records import Message, Role
from headrace.platform.store.files import append_lines, open_url
from headrace.platform.store.run_root import RunRoot
from headrace.trainer.model import load_folder

USAGE = 2


def ignore(step: SftStep) -> None:
    pass


def lookup_chats(file: Path, count: int = 24, answer: str = "") -> Path:
    """Solved tasks of the lookup world as chats; `answer` replaces what is found."""
    rows = []
    for task in LookupTasks("train", 3).next(count):
        chain, value = task.data["chain"], answer or task.data["answer"]
        messages = [{"role": "user", "content": f"find {chain[0]}"}]
        for key, following in zip(chain, [*chain[1:], None], strict=True):
            call = {"function": {"name": "get", "arguments": {"key": key}}}
            found = f"{key}=@{following}" if following else f"{key}={value}"
            messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": found}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": value}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """An untrained lookup model as a folder."""
    cache = tmp_path_factory.mktemp("tiny")
    return prepare_base_model(load_recipe("lookup", ["sft.stages=[]", f"sft.cache_dir={cache}"], RECIPES), ignore).path


@pytest.fixture(scope="module")
def run_root(lookup_model, tmp_path_factory) -> RunRoot:
    """A short run with stored episodes, good and bad ones."""
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs")))[1]


def recipe(tmp_path: Path, stage: str, *changes: str) -> RunConfig:
    return load_recipe(
        "lookup", [f"sft.stages=[{{{stage}}}]", f"sft.cache_dir={tmp_path / 'cache'}", *changes], RECIPES
    )


class TestInARecipe:
    def test_chats_are_imitated_and_success_is_measured_at_the_end(self, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        steps: list[SftStep] = []
        config = recipe(tmp_path, f"name: shown, data: {file}, max_steps: 4, batch: 8, measure_tasks: 8")
        base = prepare_base_model(config, steps.append)
        (stage,) = base.stages
        assert (stage["steps"], stage["traces"]["rows"], stage["traces"]["left_out"]) == (4, 24, {})
        assert stage["traces"]["kept"] + stage["traces"]["held_out"] == 24
        assert stage["loss_after"] < stage["loss_before"]
        assert [step.success is None for step in steps] == [True, True, True, False]
        assert prepare_base_model(config, lambda step: pytest.fail("a cached stage ran")).cached

    def test_a_stage_may_continue_on_episodes_of_a_run(self, tmp_path, run_root):
        stage = (
            f"name: best, episodes: {run_root.url}, filter: score >= 1 and turns <= 3, max_steps: 2, measure_tasks: 4"
        )
        (result,) = prepare_base_model(recipe(tmp_path, stage), ignore).stages
        assert result["traces"]["kept"] > 0 and result["traces"]["left_out"]["filtered"] > 0

    def test_a_gate_counts_measured_success(self, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        stage = f"name: shown, data: {file}, max_steps: 4, until_success: 0.01, measure_every: 1, measure_tasks: 4"
        with pytest.raises(RunFailed, match="'shown' did not reach a success of"):
            prepare_base_model(recipe(tmp_path, stage), ignore)

    def test_traces_beyond_the_positions_of_the_model_are_left_out(self, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        config = recipe(tmp_path, f"name: shown, data: {file}, max_steps: 1", "model.tiny_llama.max_positions=16")
        with pytest.raises(ConfigError, match=r"`max_tokens` is 16"):
            prepare_base_model(config, ignore)

    @pytest.mark.parametrize("missing", ["data: gone.jsonl", "episodes: gone"])
    def test_a_source_that_is_not_there_is_named(self, missing, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises((ConfigError, NotFound), match="gone"):
            prepare_base_model(recipe(tmp_path, f"name: s, {missing}"), ignore)


class TestAVocabularyForATinyModel:
    @pytest.mark.parametrize(("kind", "size"), [("bytes", 257), ("trained", 290)])
    def test_it_is_made_for_the_chats(self, kind, size, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        changes = (f"model.tiny_llama.vocabulary={kind}", "model.tiny_llama.vocabulary_size=400")
        base = prepare_base_model(
            recipe(
                tmp_path,
                f"name: s, data: {file}, max_steps: 1, measure_tasks: 4",
                *changes,
                "model.tiny_llama.max_positions=512",
            ),
            ignore,
        )
        entries = load_folder(base.path).config.vocab_size
        assert size <= entries <= 400
        assert base.stages[0]["traces"]["left_out"] == {}
        renderer = load_renderer(base.path)
        words = renderer.render([Message(Role.USER, "find k01")], ())
        assert renderer.decode(words).startswith("<|im_start|>user\nfind k01<|im_end|>")

    def test_without_chats_there_is_nothing_to_learn_it_from(self, tmp_path):
        with pytest.raises(ConfigError, match="learns its words from the chats"):
            prepare_base_model(recipe(tmp_path, "name: s", "model.tiny_llama.vocabulary=trained"), ignore)


class TestTheCacheKey:
    def test_covers_what_is_in_the_file(self, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        config = recipe(tmp_path, f"name: s, data: {file}")
        first = cache_folder(config)
        assert cache_folder(config) == first
        lookup_chats(file, answer="v01")
        assert cache_folder(config) != first

    def test_covers_episodes_and_rewards_of_the_run(self, tmp_path):
        root = RunRoot.create(str(tmp_path), "run-1", "name: run\n")
        config = recipe(tmp_path, f"name: s, episodes: {root.url}")
        first = cache_folder(config)
        fs, path = open_url(root.join("rewards/w.jsonl"))
        append_lines(fs, path, b'{"a": 1}\n')
        assert cache_folder(config) != first
        assert cache_folder(recipe(tmp_path, f"name: s, episodes: {root.url}, filter: turns < 2")) != first

    def test_covers_the_code_of_the_environment(self, tmp_path, monkeypatch):
        config = recipe(tmp_path, "name: s")
        first = cache_folder(config)
        monkeypatch.setitem(ENVIRONMENTS, "lookup", dataclasses.replace(ENVIRONMENTS["lookup"], digest="changed"))
        assert cache_folder(config) != first

    def test_covers_files_that_an_environment_names(self, tmp_path):
        """Such as the rows of its tasks and the code of its scorer: measured success depends on them."""
        code = tmp_path / "grader.py"
        code.write_text("a = 1\n")
        config = recipe(tmp_path, "name: s", f"environments.0.scorer={{kind: '{code}:Grader'}}")
        first = cache_folder(config)
        code.write_text("a = 2\n")
        assert cache_folder(config) != first


class TestFinetune:
    def test_the_loss_on_what_was_held_out_falls(self, tiny_folder, tmp_path):
        steps: list[SftStep] = []
        settings = FinetuneSettings(epochs=2, lr=3e-3, batch=8)
        file = lookup_chats(tmp_path / "chats.jsonl")
        report = finetune(file, tiny_folder, tmp_path / "out", settings, steps.append)
        assert report["traces"]["held_out"] == 1 and report["steps"] == len(steps) == 6  # 2 x 23 traces, 8 a step
        assert report["loss_after"] < report["loss_before"]
        assert report["success"] is None
        load_folder(tmp_path / "out")
        assert load_renderer(tmp_path / "out").digest == load_renderer(tiny_folder).digest
        assert json.loads((tmp_path / "out" / "stages.json").read_text()) == [report]

    def test_the_seed_decides_everything(self, tiny_folder, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl")
        weights = []
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            finetune(file, tiny_folder, tmp_path / name, FinetuneSettings(steps=3, seed=seed), ignore)
            weights.append((tmp_path / name / "model.safetensors").read_bytes())
        assert weights[0] == weights[1] != weights[2]

    def test_too_few_prompts_are_all_trained_on(self, tiny_folder, tmp_path):
        file = lookup_chats(tmp_path / "chats.jsonl", 4)
        report = finetune(file, tiny_folder, tmp_path / "out", FinetuneSettings(steps=1), ignore)
        assert (report["traces"]["held_out"], report["loss_before"], report["loss_after"]) == (0, None, None)

    def test_a_result_whose_place_was_taken_is_kept(self, tiny_folder, tmp_path):
        file, out = lookup_chats(tmp_path / "chats.jsonl"), tmp_path / "out"
        with pytest.raises(RunFailed, match=r"the result is in ") as caught:
            finetune(file, tiny_folder, out, FinetuneSettings(steps=1), lambda step: out.mkdir())
        load_folder(str(caught.value).rpartition(" ")[2])

    def test_a_tokenizer_of_another_model_is_refused(self, tiny_folder, tmp_path):
        other = prepare_base_model(
            load_recipe(
                "lookup", ["sft.stages=[]", f"sft.cache_dir={tmp_path}", "model.tiny_llama.vocabulary=bytes"], RECIPES
            ),
            ignore,
        ).path
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (other / name).unlink(missing_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tiny_folder / name, other / name)
        for name, data in vocabulary_files("bytes", (), 0).items():
            (other / name).write_bytes(data)
        with pytest.raises(ConfigError, match=r"the token \d+, but the model embeds \d+ tokens"):
            finetune(lookup_chats(tmp_path / "c.jsonl"), other, tmp_path / "out", FinetuneSettings(steps=1), ignore)
        assert not (tmp_path / "out").exists()

    def test_an_interrupted_training_leaves_nothing(self, tiny_folder, tmp_path):
        def interrupt(step: SftStep) -> None:
            raise KeyboardInterrupt

        file = lookup_chats(tmp_path / "chats.jsonl")
        with pytest.raises(KeyboardInterrupt):
            finetune(file, tiny_folder, tmp_path / "out" / "model", FinetuneSettings(), interrupt)
        assert list((tmp_path / "out").iterdir()) == []


class TestCommand:
    def answer(self, monkeypatch, capsys, *args: str) -> dict:
        assert call_main(monkeypatch, "sft", *args, "--json") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    def test_chats(self, tiny_folder, tmp_path, monkeypatch, capsys):
        file, out = lookup_chats(tmp_path / "chats.jsonl"), tmp_path / "out"
        options = ("--steps", "3", "--lr", "3e-3", "--batch", "4", "--max-tokens", "60")
        result = self.answer(monkeypatch, capsys, str(file), "--model", str(tiny_folder), "--out", str(out), *options)
        assert result["path"] == str(out) and result["steps"] == 3 and result["traces"]["rows"] == 24
        assert {"loss", "loss_before", "loss_after", "seconds", "model"} <= result.keys()
        load_folder(out)

    def test_progress_and_result_for_people(self, tiny_folder, tmp_path, monkeypatch, capsys):
        file = lookup_chats(tmp_path / "chats.jsonl")
        args = ("sft", str(file), "--model", str(tiny_folder), "--out", str(tmp_path / "out"), "--steps", "3")
        assert call_main(monkeypatch, *args) == 0
        shown = capsys.readouterr()
        assert "step 3/3" in shown.err
        assert "23 imitated, 1 held out; left out: none" in shown.out and f"{tmp_path / 'out'}" in shown.out

    def test_what_the_model_does_not_see_is_told(self, tiny_folder, tmp_path, monkeypatch, capsys):
        file = tmp_path / "chats.jsonl"
        messages = [{"role": "user", "content": "Zürich"}, {"role": "assistant", "content": "v01"}]
        file.write_text(json.dumps({"messages": messages, "tools": [{"name": "get"}]}) + "\n")
        args = ("sft", str(file), "--model", str(tiny_folder), "--out", str(tmp_path / "out"), "--steps", "1")
        assert call_main(monkeypatch, *args) == 0
        shown = capsys.readouterr().out
        assert "1 of 1 rows: the model's template does not show the list of tools" in shown
        assert "1 of 1 rows: what others say has words that the model's tokenizer does not know" in shown

    def test_a_run_starts_from_its_newest_version(self, run_root, tmp_path, monkeypatch, capsys):
        runs, out = str(Path(run_root.url).parent), tmp_path / "out"
        result = self.answer(
            monkeypatch,
            capsys,
            run_root.name[:-2],
            "--runs-dir",
            runs,
            "--out",
            str(out),
            "--filter",
            "score >= 1",
            "--steps",
            "2",
        )
        assert result["traces"]["kept"] > 0 and result["traces"]["left_out"]["filtered"] > 0
        assert result["model"].startswith(run_root.url)
        load_folder(out)

    def test_another_models_tokens_are_refused(self, run_root, tmp_path, monkeypatch, capsys, lookup_model):
        other = tmp_path / "other"
        other.mkdir()
        for file in lookup_model.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        (other / "chat_template.jinja").write_text((lookup_model / "chat_template.jinja").read_text() + " ")
        args = ("sft", run_root.url, "--model", str(other), "--out", str(tmp_path / "out"))
        assert call_main(monkeypatch, *args) == USAGE
        assert "another tokenizer or template" in capsys.readouterr().err

    WRONG = (
        (("chats.jsonl", "--out", "o"), "--model"),
        (("chats.jsonl", "--model", "m"), "--out"),
        (("gone.jsonl", "--model", "TINY", "--out", "o"), "gone.jsonl"),
        (("chats.jsonl", "--model", "gone", "--out", "o"), "gone"),
        (("chats.jsonl", "--model", "TINY", "--out", "."), "exists"),
        (("chats.jsonl", "--model", "gone", "--out", "chats.jsonl/o"), "chats.jsonl is no folder"),
        (("chats.json", "--model", "gone", "--out", "o"), "one row a line"),
        (("chats.jsonl", "--model", "gone", "--out", "o", "--lr", "-1"), "--lr -1.0: give a number above 0"),
        (("chats.jsonl", "--model", "gone", "--out", "o", "--lr", "nan"), "--lr nan"),
        (("chats.jsonl", "--model", "gone", "--out", "o", "--lr", "inf"), "--lr inf"),
        (("chats.jsonl", "--model", "gone", "--out", "o", "--epochs", "inf"), "--epochs inf"),
        (("lookup", "--out", "chats.jsonl/o"), "chats.jsonl is no folder"),
        (("chats.jsonl", "--model", "TINY", "--out", "o", "--filter", "score >= 1"), "--filter"),
        (("chats.jsonl", "--model", "TINY", "--out", "o", "--steps", "1", "--epochs", "1"), "--epochs"),
        (("chats.jsonl", "seed=1", "--model", "TINY", "--out", "o"), "seed=1"),
        (("lookup", "--lr", "1"), "--lr"),
        (("lookup", "--model", "TINY"), "--model"),
        (("lokup", "--out", "o"), "lookup"),
        (("RUN", "--out", "o", "--filter", "scor >= 1"), "did you mean 'score'"),
        (("RUN", "--out", "o", "--filter", "split == 'dev'"), "dev split"),
        (("RUN", "--out", "o", "--filter", "score > 99"), "filtered"),
    )

    @pytest.mark.parametrize(("args", "named"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
    def test_wrong_usage_is_2_and_leaves_nothing(
        self, args, named, tiny_folder, run_root, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        lookup_chats(tmp_path / "chats.jsonl", 2)
        (tmp_path / "chats.json").write_text("[]")
        given = {"TINY": str(tiny_folder), "RUN": run_root.url}
        assert call_main(monkeypatch, "sft", *(given.get(arg, arg) for arg in args)) == USAGE
        assert named in capsys.readouterr().err
        assert not (tmp_path / "o").exists()
