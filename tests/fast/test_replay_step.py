"""`headrace replay-step` on short runs: every step comes to the published weights again; a changed record does not."""

import json
import shutil
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from command_line import call_main
from run_kit import RECIPES, run_inprocess, stored

from headrace.platform.config.load import load_recipe
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.status import Fate
from headrace.platform.store.columns import SCHEMA
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable

EQUAL, DIFFERS, CANNOT = 0, 1, 2
WORLD = """\
import headrace

def reward(completion: str) -> float:
    return float(sum(completion.encode()) % 2)

Odd = headrace.SingleTurn([{"prompt": f"{n}?"} for n in range(40)], reward=reward)
"""
SMALL = {
    "sft": "null",
    "runtime.kind": "inprocess",
    "model.tiny_llama.vocabulary": "bytes",
    "model.tiny_llama.hidden": "32",
    "model.tiny_llama.heads": "2",
    "model.tiny_llama.layers": "1",
    "model.tiny_llama.intermediate": "32",
    "model.tiny_llama.max_positions": "32",
    "learner.steps": "4",
    "learner.batch_groups": "2",
    "learner.checkpoint_every": "2",
    "learner.keep_checkpoints": "9",
    "learner.algorithm.group_size": "4",
    "learner.warmup": "2",
    "eval.tasks": "1",
}


def played(folder: Path, *changes: str) -> RunRoot:
    """A run of an untrained model in a world where the answer's bytes are odd or even."""
    (folder / "odd.py").write_text(WORLD)
    (folder / "recipe.yaml").write_text(
        f"extends: lookup\nenvironments: [{{name: {folder}/odd.py:Odd, budgets: {{max_turns: 1, max_tokens: 16}},"
        " sampling: {temperature: 1.0, max_new_tokens: 6}}]\n"
    )
    given = [f"{key}={value}" for key, value in SMALL.items()]
    config = load_recipe(str(folder / "recipe.yaml"), [*given, f"runs_dir={folder / 'runs'}", *changes], RECIPES)
    return run_inprocess(config)[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunRoot:
    """Four steps, a version each; checkpoints at versions 0, 2 and 4."""
    return played(tmp_path_factory.mktemp("run"))


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run a command; its exit code, its last line as JSON where there is one, and its errors."""

    def call(command: str, root: RunRoot, *args: str):
        code = call_main(monkeypatch, command, root.url, *args, "--json")
        told = capsys.readouterr()
        return code, json.loads(told.out.splitlines()[-1]) if told.out else {}, told.err

    return call


def copied(root: RunRoot, folder: Path) -> RunRoot:
    """A copy of a run that may be spoilt."""
    return RunRoot(str(shutil.copytree(root.url, folder / root.name)))


def forge(root: RunRoot, episode_id: str) -> None:
    """Change a stored episode, in the file that holds it."""
    for file in (Path(root.url) / "episodes").rglob("*.parquet"):
        table = pq.read_table(file, schema=SCHEMA)
        ids = table["episode_id"].to_pylist()
        if episode_id in ids:
            payloads = table["payload"].to_pylist()
            row = ids.index(episode_id)
            changed = msgspec.structs.replace(episode_codec.decode(payloads[row]), duration_s=1234.5)
            payloads[row] = episode_codec.encode(changed)
            column = table.schema.get_field_index("payload")
            pq.write_table(table.set_column(column, SCHEMA.field("payload"), [payloads]), file)


class TestARun:
    @pytest.mark.parametrize("step", [1, 2, 3, 4])
    def test_every_step_comes_to_the_published_weights(self, run, ask, step):
        code, told, _ = ask("replay-step", run, str(step))
        assert (code, told["equal"], told["step"]) == (EQUAL, True, step)
        assert told["found"] == told["of_record"]
        assert told["begun_at"] == {1: 0, 2: 0, 3: 2, 4: 2}[step], "the newest checkpoint before the step"
        assert [one["step"] for one in told["taken"]] == list(range(told["begun_at"] + 1, step + 1))
        assert all(one["loss"] == one["loss_of_record"] for one in told["taken"])
        assert told["differences"] is None

    def test_it_may_begin_earlier(self, run, ask):
        code, told, _ = ask("replay-step", run, "4", "--from", "0")
        assert (code, told["equal"]) == (EQUAL, True)
        assert [one["step"] for one in told["taken"]] == [1, 2, 3, 4]

    def test_nothing_of_the_run_is_changed(self, run, ask):
        def contents():
            return {path: path.read_bytes() for path in Path(run.url).rglob("*") if path.is_file()}

        before = contents()
        ask("replay-step", run, "2")
        ask("sensitivity", run, "2")
        assert contents() == before

    def test_text(self, run, monkeypatch, capsys):
        assert call_main(monkeypatch, "replay-step", run.url, "3") == EQUAL
        out = capsys.readouterr().out
        assert "step 3: 2 groups" in out and "of record" in out and "equal: the weights are those" in out


class TestAChangedRecord:
    def test_a_changed_episode_is_refused_by_its_hash(self, run, ask, tmp_path):
        copy = copied(run, tmp_path)
        fates = FateTable(run.url).by_episode()
        chosen = next(e for e in stored(run) if e.episode_id in fates and fates[e.episode_id].version == 3)
        assert fates[chosen.episode_id].fate is Fate.TRAINED
        forge(copy, chosen.episode_id)
        code, _, err = ask("replay-step", copy, "3")
        assert code == CANNOT
        assert chosen.episode_id in err and "its hash is another one" in err

    def test_other_settings_come_to_other_weights(self, run, ask, tmp_path, monkeypatch, capsys):
        copy = copied(run, tmp_path)
        text = copy.read_config()
        assert "lr: 0.001" in text
        copy.write_config(text.replace("lr: 0.001", "lr: 0.002"))
        code, told, _ = ask("replay-step", copy, "3")
        assert (code, told["equal"], told["files"]) == (DIFFERS, False, ["model.safetensors"])
        assert told["taken"][0]["loss"] == told["taken"][0]["loss_of_record"], "the loss is of before the step"
        sizes = [far for _, far in told["differences"]]
        assert sizes == sorted(sizes, reverse=True) and 0 < sizes[0] < 0.01
        assert call_main(monkeypatch, "replay-step", copy.url, "3") == DIFFERS
        assert "they differ, in model.safetensors" in capsys.readouterr().out

    def test_of_removed_weights_it_only_says_that_they_differ(self, run, ask, tmp_path):
        copy = copied(run, tmp_path)
        copy.write_config(copy.read_config().replace("lr: 0.001", "lr: 0.002"))
        for folder in (Path(copy.url) / "versions").glob("f*-v000003"):
            shutil.rmtree(folder)
        code, told, _ = ask("replay-step", copy, "3")
        assert (code, told["differences"]) == (DIFFERS, None)


class TestWhatCannotBeRecomputed:
    @pytest.mark.parametrize("command", ["replay-step", "sensitivity"])
    def test_a_step_that_was_not_taken(self, run, ask, command):
        code, _, err = ask(command, run, "5")
        assert code == CANNOT
        assert "no learner step 5; the run has published the steps 1 to 4" in err

    @pytest.mark.parametrize("command", ["replay-step", "sensitivity"])
    def test_a_step_before_the_checkpoints_that_are_left(self, run, ask, tmp_path, command):
        copy = copied(run, tmp_path)
        shutil.rmtree(Path(copy.url) / "checkpoints" / "000000")
        code, _, err = ask(command, copy, "2")
        assert code == CANNOT
        assert "steps 3 to 4 can be" in err and "learner.keep_checkpoints" in err
        assert ask(command, copy, "3")[0] == EQUAL

    def test_a_version_to_begin_at_that_has_no_checkpoint_or_comes_later(self, run, ask):
        code, _, err = ask("replay-step", run, "4", "--from", "1")
        assert code == CANNOT and "no complete checkpoint of that version; before step 4: 0, 2" in err
        code, _, err = ask("replay-step", run, "2", "--from", "2")
        assert code == CANNOT and "made by step 2, not before step 2" in err

    def test_a_checkpoint_that_was_altered(self, run, ask, tmp_path):
        copy = copied(run, tmp_path)
        weights = Path(copy.url) / "checkpoints" / "000002" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
        code, _, err = ask("replay-step", copy, "3")
        assert code == CANNOT and "the checkpoint of version 2 is torn or altered" in err
        assert ask("replay-step", copy, "3", "--from", "0")[0] == EQUAL


def test_several_steps_of_one_version_are_compared_at_the_version(tmp_path, ask):
    root = played(tmp_path, "learner.publish_every=2", "learner.checkpoint_every=1")
    for step, version in ((1, 1), (2, 1), (3, 2), (4, 2)):
        code, told, _ = ask("replay-step", root, str(step))
        assert (code, told["equal"], told["version"]) == (EQUAL, True, version)
        assert [one["version"] for one in told["taken"]] == [version, version]
    code, told, _ = ask("sensitivity", root, "4")
    assert (code, told["steps_taken"]) == (EQUAL, 1)


TWO_STEPS = ("learner.steps=2", "learner.checkpoint_every=1", "learner.warmup=1")


@pytest.mark.parametrize(
    "algorithm",
    [
        ("learner.algorithm.name=reinforce", "learner.algorithm.baseline=running"),
        ("learner.algorithm.name=ppo", "learner.schedule=cosine"),
        ("learner.lora.rank=2", "learner.dtype=bfloat16"),
    ],
    ids=["a running mean", "a critic", "adapters"],
)
def test_state_beside_the_weights_is_taken_up(tmp_path, ask, algorithm):
    root = played(tmp_path, *TWO_STEPS, *algorithm)
    code, told, err = ask("replay-step", root, "2")
    assert (code, told.get("equal"), told.get("begun_at")) == (EQUAL, True, 1), err
    code, told, err = ask("sensitivity", root, "2")
    assert (code, len(told["corrections"])) == (EQUAL, 5), err


def test_the_reference_is_the_weights_that_the_run_began_with(tmp_path, ask, monkeypatch):
    root = played(tmp_path, *TWO_STEPS, "learner.algorithm.kl.coefficient=0.1")
    code, told, err = ask("replay-step", root, "2")
    assert (code, told.get("equal"), told.get("begun_at")) == (EQUAL, True, 1), err
    for first in (*Path(root.url).glob("versions/f*-v000000"), Path(root.url) / "checkpoints" / "000000"):
        shutil.rmtree(first)
    monkeypatch.setenv("HOME", str(tmp_path / "another"))  # and its cache of first models
    code, _, err = ask("replay-step", root, "2")
    assert code == CANNOT and "the weights that the run began with are gone" in err
