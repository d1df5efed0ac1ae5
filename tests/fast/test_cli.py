"""The command line: help for newcomers, exit codes, and one JSON object on the last line."""

import json

import pytest
from command_line import call_main
from run_kit import only_root, overrides

COMMANDS = (
    "train",
    "sft",
    "eval",
    "compare",
    "export",
    "inspect",
    "replay",
    "env",
    "doctor",
    "approvals",
    "audit verify",
    "redteam run",
)
USAGE, FAILED = 2, 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_a_command(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert call_main(monkeypatch, *command.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"headrace {command}" in out
    assert "--json" in out
    assert len(out.splitlines()) > 10


def test_help_lists_the_commands(monkeypatch, capsys):
    assert call_main(monkeypatch, "-h") == 0
    out = capsys.readouterr().out
    assert all(command.split()[0] in out for command in COMMANDS)


def test_no_arguments_show_the_help(monkeypatch, capsys):
    assert call_main(monkeypatch) == USAGE
    assert "Usage" in "".join(capsys.readouterr())


WRONG = {
    "unknown command": (("trian", "lookup"), "trian"),
    "unknown option": (("train", "lookup", "--jsn"), "--jsn"),
    "no recipe": (("train",), "recipe"),
    "no step to branch from": (("replay", "some-run", "t1.0.0", "--branch", "x"), "--branch"),
    "unknown key": (("train", "lookup", "learner.lrr=1"), "learner.lr"),
    "unknown section": (("train", "lookup", "learnr.lr=1"), "learner"),
    "unknown key of a list item": (("train", "lookup", "environments.lookup.wieght=1"), "weight"),
    "wrong value": (("train", "lookup", "learner.lr=fast"), "learner.lr"),
    "no override": (("train", "lookup", "fast"), "key=value"),
    "unknown recipe": (("train", "lokup"), "lookup"),
    "unknown recipe file": (("train", "./none.yaml"), "none.yaml"),
    "unknown recipe for sft": (("sft", "lokup"), "lookup"),
    "no supervised stages": (("sft", "lookup", "sft=null"), "sft"),
    "spelled-out password": (("train", "lookup", "--redis-url", "redis://:hunter2@host:1/0"), "${env:NAME}"),
    "unknown run": (("inspect", "nothing"), "nothing"),
    "unknown run to replay": (("replay", "nothing", "t0.0.0"), "nothing"),
    "no model": (("train", "lookup", "model.path=/no/such/folder", "model.tiny_llama=null", "sft=null"), "/no/such"),
    "unknown environment": (("train", "lookup", "environments.0.name=lokup"), "lookup"),
    "unknown argument of an environment": (("train", "lookup", "environments.0.args.hop=[1]"), "hops"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_2_and_names_what_was_meant(case, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, named = WRONG[case]
    assert call_main(monkeypatch, *args) == USAGE
    err = capsys.readouterr().err
    assert named in err
    assert "Traceback" not in err
    assert "hunter2" not in err
    assert not (tmp_path / "runs").exists(), "nothing starts on a wrong recipe"


def test_an_unreadable_recipe_is_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "torn.yaml").write_text("name: [lookup\n")
    assert call_main(monkeypatch, "train", str(tmp_path / "torn.yaml"), "--dry-run") == USAGE
    assert "torn.yaml" in capsys.readouterr().err


def test_a_joined_cluster_needs_a_server_for_all_its_nodes(monkeypatch, capsys, tmp_path):  # case V4
    monkeypatch.chdir(tmp_path)
    assert call_main(monkeypatch, "train", "lookup", "--ray-address", "127.0.0.1:1") == USAGE
    assert "queue.redis_url" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "an error before anything starts"


def test_train_inspect_and_replay(lookup_model, tmp_path, monkeypatch, capsys):
    """A newcomer's way through the commands, by prefixes."""
    assert call_main(monkeypatch, "train", "lookup", *overrides(lookup_model, tmp_path), "--json") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert len(captured.out.splitlines()) == 1, "progress goes to standard error"
    assert "step 3/3" in captured.err
    root = only_root(tmp_path)
    assert summary["run"] == root.name and summary == root.read_summary()

    where = ("--runs-dir", str(tmp_path))
    assert call_main(monkeypatch, "inspect", "lookup", *where, "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["summary"] == summary
    episode = next(row["episode_id"] for row in facts["episodes"])
    assert call_main(monkeypatch, "replay", "lookup", episode, *where, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is True


def test_train_tells_people_how_it_went(lookup_model, tmp_path, monkeypatch, capsys):
    assert call_main(monkeypatch, "train", "lookup", *overrides(lookup_model, tmp_path)) == 0
    out = capsys.readouterr().out
    summary = only_root(tmp_path).read_summary()
    assert f"{summary['success_before']:.3f} -> {summary['success_after']:.3f}" in out
    assert f"{summary['fates']['dispatched']} dispatched" in out
    assert f"headrace inspect {summary['run']}" in out


class TestUnknownEpisodes:
    @pytest.fixture
    def runs_dir(self, tmp_path):
        from headrace.platform.store.run_root import RunRoot

        RunRoot.create(str(tmp_path), "lookup-aaaa", "name: lookup\n")
        RunRoot.create(str(tmp_path), "lookup-aabb", "name: lookup\n")
        return tmp_path

    def test_an_episode_that_is_not_there(self, runs_dir, monkeypatch, capsys):
        assert call_main(monkeypatch, "inspect", "lookup-aaaa", "t9.9.9", "--runs-dir", str(runs_dir)) == USAGE
        assert "t9.9.9" in capsys.readouterr().err

    def test_a_prefix_that_fits_two_runs(self, runs_dir, monkeypatch, capsys):
        assert call_main(monkeypatch, "inspect", "lookup-aa", "--runs-dir", str(runs_dir)) == USAGE
        err = capsys.readouterr().err
        assert "lookup-aaaa" in err and "lookup-aabb" in err

    def test_a_run_that_has_not_ended_can_be_inspected(self, runs_dir, monkeypatch, capsys):
        assert call_main(monkeypatch, "inspect", "lookup-aaaa", "--runs-dir", str(runs_dir), "--json") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"] == {}


class TestSft:
    QUICK = ("sft.stages=[{name: quick, max_steps: 2, batch: 4}]",)

    def test_writes_a_folder_that_trains_on(self, tmp_path, monkeypatch, capsys):
        out = tmp_path / "base"
        cache = f"sft.cache_dir={tmp_path / 'cache'}"
        assert call_main(monkeypatch, "sft", "lookup", *self.QUICK, cache, "--out", str(out), "--json") == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["path"] == str(out)
        assert [stage["steps"] for stage in result["stages"]] == [2]
        assert (out / "config.json").is_file() and (out / "tokenizer.json").is_file()
        assert call_main(monkeypatch, "sft", "lookup", *self.QUICK, cache, "--out", str(out)) == USAGE

    def test_the_second_time_is_cached(self, tmp_path, monkeypatch, capsys):
        args = ("sft", "lookup", *self.QUICK, f"sft.cache_dir={tmp_path}", "--json")
        answers = []
        for _ in range(2):
            assert call_main(monkeypatch, *args) == 0
            answers.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
        assert [answer["cached"] for answer in answers] == [False, True]
        assert answers[0]["path"] == answers[1]["path"]
        assert answers[0]["stages"] == answers[1]["stages"]

    def test_a_gate_that_is_not_reached_is_1_and_leaves_nothing(self, tmp_path, monkeypatch, capsys):
        stage = "sft.stages=[{name: hopeless, max_steps: 2, measure_every: 1, measure_tasks: 4, until_success: 0.9}]"
        assert call_main(monkeypatch, "sft", "lookup", stage, f"sft.cache_dir={tmp_path}") == FAILED
        assert "hopeless" in capsys.readouterr().err
        assert not list((tmp_path / "sft").iterdir())
