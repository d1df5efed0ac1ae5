"""`headrace eval` and `headrace compare` on a stored run and on a model folder, with an untrained model."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from command_line import call_main, last_json

from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.evaluate import EvaluationRequest, evaluate, evaluation_digests, prepare
from headrace.deploy.stored_version import open_version
from headrace.platform.config.load import dump_yaml, load_recipe
from headrace.platform.errors import NotFound, RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Purpose, VersionManifest, VersionRef
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.evaluations import EvaluationStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore

RECIPES = recipes_dir()
RUN = "lookup-1a2b3c"
SMALL = ("--tasks", "5", "--samples", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model of random weights that knows the words of lookup."""
    config = load_recipe("lookup", ["sft=null"], RECIPES)
    return prepare_base_model(config, lambda step: None, tmp_path_factory.mktemp("model") / "base").path


@pytest.fixture
def runs(model, tmp_path, monkeypatch) -> Path:
    """A folder of runs with one run of versions 0 and 3, of which 0 is the best."""
    monkeypatch.chdir(tmp_path)
    config = load_recipe("lookup", [f"model={json.dumps({'path': str(model)})}", "sft=null", "eval.tasks=4"], RECIPES)
    root = RunRoot.create("runs", RUN, dump_yaml(config))
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    asyncio.run(publish(root, files, (0, 3)))
    root.write_best({"version": 0})
    return tmp_path / "runs"


@pytest.fixture
def few(runs) -> str:
    """An environment of twenty questions, as people name it."""
    (runs.parent / "one.py").write_text(
        "import headrace\n"
        "rows = [{'prompt': f'who is {n} ?', 'answer': str(n)} for n in range(20)]\n"
        "Few = headrace.SingleTurn(rows, reward=lambda completion, answer: float(answer in completion))\n"
    )
    return "./one.py:Few"


async def publish(root, files, numbers):
    ledger = MemoryLedger(RUN, LedgerLimits(batch_groups=1, max_lag=0), lambda: 0.0)
    registry = FileRegistry(root.url, ledger, cache_dir=Path("cache"), run=RUN, pins=MemoryPins(lambda: 0.0))
    for number in numbers:
        path, hashes, content_hash = await registry.stage(number, 1, files)
        await registry.manifest(
            VersionManifest(
                ref=VersionRef("policy", number),
                parent=None,
                parent_hash="",
                fence=1,
                kind="full",
                content_hash=content_hash,
                batches=number,
                path=path,
                files=hashes,
            )
        )


def answer(monkeypatch, capsys, *args) -> dict:
    assert call_main(monkeypatch, *args, "--json") == 0, capsys.readouterr().err
    return last_json(capsys.readouterr().out)


def refusal(monkeypatch, capsys, *args) -> tuple[int, str]:
    code = call_main(monkeypatch, *args)
    return code, capsys.readouterr().err


def episodes(root: Path):
    return list(EpisodeStore(str(root)).iterate())


class TestARun:
    def test_everything_is_stored_where_people_look_for_it(self, runs, monkeypatch, capsys):
        facts = answer(monkeypatch, capsys, "eval", "lookup-1", *SMALL)
        assert (facts["run"], facts["version"], facts["split"], facts["name"]) == (RUN, 3, "dev", "v000003-dev-01")
        assert (facts["tasks"], facts["episodes"], facts["scored"]) == (5, 10, 10)
        assert set(facts["pass_hat"]) == {"1", "2"}
        stored = EvaluationStore(str(runs / RUN)).read("v000003-dev-01")
        assert Path(facts["path"]).is_file() and facts["success"] == pytest.approx(
            sum((each.score or 0) >= 1 for each in stored.outcomes) / 10
        )
        played = episodes(runs / RUN)
        assert {each.purpose for each in played} == {Purpose.EVAL}
        assert {each.task.split for each in played} == {"dev"}  # case V2
        assert {each.version.number for each in played} == {3}
        assert {each.episode_id for each in played} == {each.episode_id for each in stored.outcomes}
        assert set(RewardTable(str(runs / RUN)).by_episode()) <= {each.episode_id for each in played}

    def test_the_next_evaluation_plays_the_same_worlds_under_other_ids(self, runs, monkeypatch, capsys):
        answer(monkeypatch, capsys, "eval", RUN, *SMALL)
        facts = answer(monkeypatch, capsys, "eval", RUN, *SMALL, "--version", "0", "--against", f"{RUN}@3")
        store = EvaluationStore(str(runs / RUN))
        one, two = store.read("v000003-dev-01"), store.read("v000000-dev-02")
        worlds = [[(each.task_id, each.seed, each.sample) for each in made.outcomes] for made in (one, two)]
        assert worlds[0] == worlds[1] and len(worlds[0]) == 10
        assert len({each.episode_id for made in (one, two) for each in made.outcomes}) == 20
        comparison = facts["comparison"]
        assert (comparison["a"], comparison["b"]) == (f"{RUN}@v000003-dev-01", f"{RUN}@v000000-dev-02")
        assert comparison["overall"]["pairs"] == 10 and comparison["unpaired"] == {} and not comparison["warnings"]
        alone = answer(monkeypatch, capsys, "compare", f"{RUN}@v3", RUN)
        assert alone == comparison

    def test_a_version_comes_out_the_same_every_time(self, runs, monkeypatch, capsys):
        names = [answer(monkeypatch, capsys, "eval", RUN, *SMALL)["name"] for _ in range(2)]
        store = EvaluationStore(str(runs / RUN))
        one, two = ([(each.task_id, each.sample, each.score) for each in store.read(name).outcomes] for name in names)
        assert one == two
        tokens = {}
        for episode in episodes(runs / RUN):
            said = tuple(tuple(turn.token_ids.tolist()) for turn in episode.turns)
            tokens.setdefault((episode.task.task_id, said), []).append(episode.episode_id)
        assert len(tokens) == 10 and all(len(ids) == 2 for ids in tokens.values()), "sampled alike, token by token"

    def test_people_get_words(self, runs, monkeypatch, capsys):
        assert call_main(monkeypatch, "eval", RUN, *SMALL) == 0
        assert call_main(monkeypatch, "eval", RUN, *SMALL, "--against", RUN) == 0
        out = capsys.readouterr().out
        for words in ("10 episodes of 5 dev tasks", "success ", "pass^k", "1: ", "2: ", "Stored as", "10 of 5 tasks"):
            assert words in out
        assert "no difference shown" in out.splitlines()[-1]

    def test_options_change_the_recipe(self, runs, monkeypatch, capsys):
        facts = answer(
            monkeypatch, capsys, "eval", RUN, "--split", "hidden", "--seed", "5", "--temperature", "0.5", "--tasks", "2"
        )
        assert (facts["name"], facts["episodes"], facts["samples"]) == ("v000003-hidden-01", 2, 1)
        played = episodes(runs / RUN)
        assert {each.task.split for each in played} == {"hidden"}
        assert {turn.sampling.temperature for each in played for turn in each.turns if turn.is_action} == {0.5}
        config = load_recipe(str(runs / RUN / "config.yaml"), [], RECIPES)
        assert facts["digests"]["recipe"] != evaluation_digests(config, "")["recipe"]

    def test_keys_change_the_recipe_as_in_training(self, runs, monkeypatch, capsys):
        changes = ("eval.split=hidden", "eval.tasks=3", "environments.lookup.budgets.max_turns=1")
        facts = answer(monkeypatch, capsys, "eval", RUN, *changes)
        assert (facts["run"], facts["split"], facts["episodes"], facts["turns"]) == (RUN, "hidden", 3, 1.0)

    def test_other_worlds_get_a_root_of_their_own(self, runs, monkeypatch, capsys):
        facts = answer(monkeypatch, capsys, "eval", RUN, "environments.lookup.args.hops=[1]", "--tasks", "2")
        assert facts["run"].startswith("eval-lookup-") and (facts["model"], facts["version"]) == (RUN, 3)
        assert not episodes(runs / RUN)
        played = episodes(runs / facts["run"])
        assert all(len(each.task.data["chain"]) == 1 for each in played)
        assert answer(monkeypatch, capsys, "replay", facts["run"], played[0].episode_id)["equal"]

    @pytest.mark.parametrize(("wanted", "number"), [("latest", 3), ("best", 0), ("0", 0), ("v3", 3)])
    async def test_versions_by_what_people_call_them(self, runs, wanted, number):
        manifest, folder = await open_version(RunRoot(str(runs / RUN)), wanted)
        assert manifest.ref.number == number
        assert (folder / "tokenizer.json").is_file()

    async def test_an_altered_file_is_refused(self, runs):
        (runs / RUN / "versions" / "f0001-v000003" / "tokenizer.json").write_text("{}")
        with pytest.raises(RegistryError, match="altered"):
            await open_version(RunRoot(str(runs / RUN)), "3")

    async def test_a_checkpoint_serves_where_retention_took_the_weights(self, runs, model):
        root = RunRoot(str(runs / RUN))
        shutil.rmtree(runs / RUN / "versions" / "f0001-v000003")
        with pytest.raises(NotFound, match=r"no weights of version 3; there are 0"):
            await open_version(root, "latest")
        files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
        state = CheckpointState(version=3, content_hash="c", batches=3, steps=3, dispatch_sequence=9)
        CheckpointStore(root.join("checkpoints")).write(state, files)
        manifest, folder = await open_version(root, "latest")
        assert (manifest.ref.number, manifest.content_hash, folder.name) == (3, "c", "000003")
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(RegistryError, match=r"tokenizer\.json is torn or altered"):
            await open_version(root, "3")

    async def test_an_interrupted_one_is_not_half_there(self, runs):
        subject = await prepare(EvaluationRequest(name=RUN, tasks=3), RECIPES)
        with pytest.raises(asyncio.CancelledError):
            await evaluate(subject, lambda text: asyncio.current_task().cancel())
        assert EvaluationStore(str(runs / RUN)).names() == []
        made, _ = await evaluate(subject, lambda text: None)
        assert made.name == "v000003-dev-02", "a claim is not used again"


class TestAModelFolder:
    def test_it_gets_a_root_of_its_own_that_people_can_look_into(self, model, runs, monkeypatch, capsys):
        facts = answer(monkeypatch, capsys, "eval", str(model), "--recipe", "lookup", *SMALL)
        assert (facts["name"], facts["version"], facts["model"]) == ("model-dev-01", None, str(model))
        assert facts["run"].startswith("eval-lookup-")
        root = runs / facts["run"]
        played = episodes(root)
        assert len(played) == 10
        seen = answer(monkeypatch, capsys, "inspect", facts["run"], played[0].episode_id)
        assert seen["purpose"] == "eval" and seen["turns"]
        assert answer(monkeypatch, capsys, "replay", facts["run"], played[0].episode_id)["equal"]

    def test_it_compares_with_a_run(self, model, runs, monkeypatch, capsys):
        answer(monkeypatch, capsys, "eval", RUN, "--tasks", "3")
        facts = answer(monkeypatch, capsys, "eval", str(model), "--recipe", "lookup", "--tasks", "4", "--against", RUN)
        assert facts["comparison"]["overall"]["pairs"] == 3
        assert facts["comparison"]["unpaired"] == {"only in b": 1}
        assert facts["comparison"]["warnings"] == []

    def test_a_run_on_another_recipe_leaves_the_run_alone(self, runs, monkeypatch, capsys):
        facts = answer(monkeypatch, capsys, "eval", RUN, "--recipe", "lookup-slow", "--tasks", "2")
        assert facts["run"].startswith("eval-lookup-slow-") and facts["model"] == RUN and facts["version"] == 3
        assert not episodes(runs / RUN)

    def test_fewer_tasks_than_asked_for_are_played_once(self, model, few, monkeypatch, capsys):
        keys = ("environments.0.budgets.max_tokens=128", "environments.0.sampling.max_new_tokens=8")
        assert call_main(monkeypatch, "eval", str(model), "--recipe", few, *keys, "--samples", "2", "--json") == 0
        captured = capsys.readouterr()
        facts = last_json(captured.out)
        stored = EvaluationStore(str(Path("runs") / facts["run"])).latest()
        assert stored.tasks == facts["tasks"] and facts["episodes"] == 2 * facts["tasks"]
        assert len({each.task_id for each in stored.outcomes}) == facts["tasks"] < 20
        assert "eval.tasks is 256, but the dev split has fewer" in captured.err
        assert f"{facts['tasks']} tasks of the dev split" in captured.err

    def test_names_are_checked_before_the_model(self, model, few, monkeypatch, capsys):
        code, err = refusal(monkeypatch, capsys, "eval", str(model), "--recipe", few.replace("Few", "Fw"))
        assert code == 2 and "Fw" in err and "Few" in err and "max_tokens" not in err
        code, err = refusal(monkeypatch, capsys, "eval", str(model), "--recipe", few)
        assert code == 2 and "budgets.max_tokens" in err, "the model is too short for the default"

    async def test_an_interrupted_one_leaves_nothing(self, model, runs):
        subject = await prepare(EvaluationRequest(name=str(model), recipe="lookup", tasks=3), RECIPES)
        with pytest.raises(asyncio.CancelledError):
            await evaluate(subject, lambda text: asyncio.current_task().cancel())
        assert [path.name for path in runs.iterdir()] == [RUN]


def test_wrong_usage_is_2_and_plays_nothing(model, runs, monkeypatch, capsys):
    wrong = {
        ("eval", "nothing"): "no run 'nothing'",
        ("eval", str(model)): "--recipe",
        ("eval", str(model), "--recipe", "lokup"): "lookup",
        ("eval", str(model), "--recipe", "lookup", "--version", "3"): "--version",
        ("eval", RUN, "--split", "train"): "never the tasks of training",  # case V2
        ("eval", RUN, "--version", "7"): "there are 0, 3",
        ("eval", RUN, "--version", "newest"): "`latest` or `best`",
        ("eval", RUN, "--samples", "0"): "eval.samples",
        ("eval", RUN, "--samples", "501"): "500 samples",
        (
            "eval",
            RUN,
            "--temperature",
            "0",
        ): "1 error\n  - environments.0.sampling.temperature: expected greater than 0",
        ("eval", RUN, "--against", "nothing"): "no run 'nothing'",
        ("eval", RUN, "nonsense"): "write key=value",
        ("eval", RUN, "eval.tasks=3", "--tasks", "4"): "eval.tasks=3 and --tasks 4: give one of them",
        ("eval", RUN, "seed=3", "--seed", "0"): "seed=3 and --seed 0",
        ("eval", RUN, "environments.lookup.sampling.temperature=2", "--temperature", "1"): "--temperature 1.0",
        ("eval", RUN, "eval.split=train"): "'dev' or 'hidden'",  # case V2
        ("eval", RUN, "eval.taks=3"): "did you mean eval.tasks",
        ("eval", RUN, "model.path=other"): "the model is what is evaluated",
        ("eval", RUN, "runs_dir=other"): "--runs-dir",
        ("compare", RUN, RUN): "has no evaluation",
        ("compare", f"{RUN}@best", RUN): "no evaluation of version 0",
        ("compare", str(model / "config.json"), RUN): "is not a stored evaluation",
    }
    for args, named in wrong.items():
        code, err = refusal(monkeypatch, capsys, *args)
        assert code == 2 and named in err, (args, err)
        assert "Traceback" not in err
    assert not episodes(runs / RUN)
    assert [path.name for path in runs.iterdir()] == [RUN]


def test_evaluations_that_do_not_pair_are_refused_but_stored(runs, monkeypatch, capsys):
    answer(monkeypatch, capsys, "eval", RUN, "--tasks", "2")
    code, err = refusal(monkeypatch, capsys, "eval", RUN, "--tasks", "2", "--seed", "9", "--against", RUN)
    assert code == 2
    assert "same tasks under other seeds" in err and f"stored as {RUN}@v000003-dev-02" in err


def test_no_valid_reward_at_all_is_a_failure_with_its_cause(runs, monkeypatch, capsys):
    from headrace.actors.environments.lookup.environment import LookupEnvironment

    async def broken(self, task, seed):
        raise KeyError("chain")

    monkeypatch.setattr(LookupEnvironment, "_reset", broken)
    code, err = refusal(monkeypatch, capsys, "eval", RUN, "--tasks", "2")
    assert code == 1
    assert "none of 2 episodes gave a valid reward" in err and "chain" in err
    assert EvaluationStore(str(runs / RUN)).latest().outcomes[0].score is None
