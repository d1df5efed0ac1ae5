"""`headrace replay` and `headrace suite` on a stored run of an untrained model, in this process."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from command_line import call_main, last_json

from headrace.actors.environments.lookup import LookupEnvironment
from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.suites import freeze, read_suite
from headrace.platform.config.load import dump_yaml, load_recipe
from headrace.platform.errors import RunFailed
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Message, Purpose, Role, VersionManifest, VersionRef
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable

RECIPES = recipes_dir()
RUN = "lookup-1a2b3c"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model of random weights that knows the words of lookup."""
    config = load_recipe("lookup", ["sft=null"], RECIPES)
    return prepare_base_model(config, lambda step: None, tmp_path_factory.mktemp("model") / "base").path


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """Where a run of versions 0 and 3 lies under `runs`; its 40 episodes are those of an evaluation of version 3."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("work")
        patch.chdir(folder)
        overrides = [f"model={json.dumps({'path': str(model)})}", "sft=null", "eval.tasks=20", "eval.samples=2"]
        root = RunRoot.create("runs", RUN, dump_yaml(load_recipe("lookup", overrides, RECIPES)))
        asyncio.run(publish(root, {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}))
        assert call_main(patch, "eval", RUN) == 0
    return folder


async def publish(root, files):
    ledger = MemoryLedger(RUN, LedgerLimits(batch_groups=1, max_lag=0), lambda: 0.0)
    registry = FileRegistry(root.url, ledger, cache_dir=Path("cache"), run=RUN, pins=MemoryPins(lambda: 0.0))
    for number in (0, 3):
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


@pytest.fixture
def work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def root(work):
    return RunRoot.find("runs", RUN)


def changed_world(monkeypatch):
    """From now on the store answers otherwise."""
    monkeypatch.setattr(LookupEnvironment, "_read", lambda self, call: "changed")

    async def opens(self, task, seed):
        observation = await _reset(self, task, seed)
        return msgspec.structs.replace(observation, messages=(Message(Role.USER, "seek it"),))

    _reset = LookupEnvironment._reset
    monkeypatch.setattr(LookupEnvironment, "_reset", opens)


def answer(monkeypatch, capsys, *args):
    capsys.readouterr()
    code = call_main(monkeypatch, *args, "--json")
    out = capsys.readouterr()
    return code, last_json(out.out) if code < 2 and out.out.strip() else out.err


# --- replay -----------------------------------------------------------------------------------------------------------


def test_all_episodes_of_a_run_replay_equal(work, monkeypatch, capsys):
    code, facts = answer(monkeypatch, capsys, "replay", "lookup")
    assert (code, facts["run"], facts["episodes"], facts["equal"]) == (0, RUN, 40, True)
    assert (facts["diverged"], facts["refused"], facts["fidelity_gap"], facts["reports"]) == (0, 0, 0, [])
    code, facts = answer(monkeypatch, capsys, "replay", "lookup", "--limit", "7")
    assert (code, facts["episodes"]) == (0, 7)
    assert call_main(monkeypatch, "replay", "lookup") == 0
    assert f"{RUN}: 40 of 40 episodes replay equal" in capsys.readouterr().out


def test_one_and_several_episodes_by_prefix(work, root, monkeypatch, capsys):
    first, second = [each.episode_id for each in EpisodeStore(root.url).iterate()][:2]
    code, facts = answer(monkeypatch, capsys, "replay", "lookup", first)
    assert (code, facts["episode_id"], facts["equal"], facts["differences"]) == (0, first, True, [])
    code, facts = answer(monkeypatch, capsys, "replay", "lookup", first, second)
    assert (code, facts["episodes"]) == (0, 2)
    code, error = answer(monkeypatch, capsys, "replay", "lookup", first, "nothing")
    assert code == 2 and "no episode 'nothing'" in error


def test_a_changed_world_diverges_with_its_texts(work, root, monkeypatch, capsys):
    changed_world(monkeypatch)
    code, facts = answer(monkeypatch, capsys, "replay", "lookup")
    assert (code, facts["equal"], facts["diverged"]) == (1, False, 40)
    episode = facts["reports"][0]["episode_id"]
    assert call_main(monkeypatch, "replay", "lookup", episode) == 1
    out = capsys.readouterr().out
    assert "first divergence at step 0" in out and "+seek it" in out and "-find k" in out


def test_another_version_of_the_world_is_refused(work, root, monkeypatch, capsys):
    monkeypatch.setattr(LookupEnvironment, "version", "7")
    code, facts = answer(monkeypatch, capsys, "replay", "lookup")
    assert (code, facts["refused"], facts["equal"]) == (1, 40, False)
    episode, reason = next(iter(facts["reasons"].items()))
    assert "version 1; the world at hand is lookup version 7. Replay it where" in reason
    code, error = answer(monkeypatch, capsys, "replay", "lookup", episode)
    assert code == 2 and "version 7" in error


def test_the_memory_of_a_replay_does_not_hold_the_run(work, monkeypatch):
    """Episodes are taken one by one: never more than are replayed at once."""
    from headrace.deploy.replaying import replay_all, run_config

    root = RunRoot.find("runs", RUN)
    config = run_config(root)
    taken, most = 0, 0

    def episodes():
        nonlocal taken
        for episode in EpisodeStore(root.url).iterate():
            taken += 1
            yield episode

    class Counting(LookupEnvironment):
        async def _step(self, message):
            await asyncio.sleep(0)
            return await super()._step(message)

        async def close(self):
            nonlocal taken, most
            most, taken = max(most, taken), taken - 1
            await super().close()

    monkeypatch.setattr("headrace.actors.worlds.Worlds._played", lambda self, config, group: Counting())
    tally = asyncio.run(replay_all(episodes(), config.environments, config.seed, at_once=4))
    assert (tally.episodes, tally.equal, most) == (40, True, 4)


# --- branching --------------------------------------------------------------------------------------------------------


def test_a_branch_is_stored_beside_the_others_and_replays_equal(work, root, monkeypatch, capsys):
    parent = next(each for each in EpisodeStore(root.url).iterate() if len(each.views) > 1)
    code, facts = answer(monkeypatch, capsys, "replay", "lookup", parent.episode_id, "--branch", "1", "--version", "0")
    assert code == 0
    branch = EpisodeStore(root.url).find(facts["episode_id"])
    assert (branch.purpose, branch.parent_episode, branch.branch_step) == (Purpose.REPLAY, parent.episode_id, 1)
    assert (branch.version.number, branch.oldest_version, branch.newest_version) == (0, 0, 3)
    assert [turn.token_ids.tolist() for turn in branch.turns[:3]] == [t.token_ids.tolist() for t in parent.turns[:3]]
    assert RewardTable(root.url).by_episode()[branch.episode_id][0].value == facts["score"]
    code, again = answer(
        monkeypatch, capsys, "replay", "lookup", parent.episode_id, "--branch", "0", "--version", "best"
    )
    assert code == 2, "no version is the best yet"
    code, again = answer(monkeypatch, capsys, "replay", "lookup", parent.episode_id, "--branch", "0")
    assert (code, again["version"], again["episode_id"] != facts["episode_id"]) == (0, 3, True)
    for episode_id in (facts["episode_id"], again["episode_id"]):
        code, report = answer(monkeypatch, capsys, "replay", "lookup", episode_id)
        assert (code, report["equal"]) == (0, True)
    purposes = {each.purpose for each in EpisodeStore(root.url).iterate({"purpose": "train"})}
    assert purposes == set(), "training never sees it (P3)"


def test_a_branch_from_nowhere_or_off_a_changed_world_is_refused(work, root, monkeypatch, capsys):
    parent = next(each for each in EpisodeStore(root.url).iterate() if each.purpose is Purpose.EVAL)
    before = [each.episode_id for each in EpisodeStore(root.url).iterate()]
    code, error = answer(monkeypatch, capsys, "replay", "lookup", parent.episode_id, "--branch", "9")
    assert code == 2 and "can go on from step 0" in error
    code, error = answer(monkeypatch, capsys, "replay", "lookup", "--branch", "0")
    assert code == 2 and "takes one episode" in error
    code, error = answer(monkeypatch, capsys, "replay", "lookup", parent.episode_id, "--version", "3")
    assert code == 2 and "--branch STEP" in error
    changed_world(monkeypatch)
    assert call_main(monkeypatch, "replay", "lookup", parent.episode_id, "--branch", "0") == 1
    assert "diverges at step 0: observation" in capsys.readouterr().err
    assert [each.episode_id for each in EpisodeStore(root.url).iterate()] == before


# --- suites -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def suite(work, root, tmp_path, monkeypatch, capsys):
    file = tmp_path / "suite.msgpack"
    code, facts = answer(monkeypatch, capsys, "suite", "freeze", "lookup", "--out", str(file), "--episodes", "24")
    assert (code, facts["version"]) == (0, 3)
    assert 20 <= facts["compared"] <= facts["episodes"] <= 24
    return file


def test_a_suite_is_self_contained_and_its_seed_picks(suite, root, tmp_path, monkeypatch, capsys):
    held = read_suite(str(suite))
    assert held.header.environments[0]["name"] == "lookup"
    ids = [episode_codec.decode(each.payload).episode_id for each in held.episodes]
    assert len(set(ids)) == len(ids)
    assert all(each.rewards for each in held.episodes if each.score is not None)
    other = tmp_path / "other.msgpack"
    for seed, same in (("0", True), ("1", False)):
        arguments = ("--out", str(other), "--episodes", "24", "--seed", seed)
        assert answer(monkeypatch, capsys, "suite", "freeze", "lookup", *arguments)[0] == 0
        again = [episode_codec.decode(each.payload).episode_id for each in read_suite(str(other)).episodes]
        assert (again == ids) == same


def test_nothing_has_changed(suite, monkeypatch, capsys):
    code, facts = answer(monkeypatch, capsys, "suite", "run", str(suite))
    assert (code, facts["world"], facts["model"]) == (0, "same", "not played")
    code, facts = answer(monkeypatch, capsys, "suite", "run", str(suite), "--run", "lookup")
    assert (code, facts["world"], facts["model"]) == (0, "same", "same")
    assert facts["success_now"] == facts["success_frozen"], "the same weights under the same dice"
    assert (facts["pairs"] > 15, facts["p_value"]) == (True, 1.0)


def test_the_world_changed(suite, monkeypatch, capsys):
    changed_world(monkeypatch)
    code, facts = answer(monkeypatch, capsys, "suite", "run", str(suite))
    assert (code, facts["world"], facts["model"]) == (1, "changed", "not played")
    assert set(facts["changed"].values()) == {0}
    assert facts["verdict"].startswith("the world changed: ")


def test_a_changed_reward_is_a_changed_world(suite, monkeypatch, capsys):
    async def generous(self, message):
        result = await step(self, message)
        rewards = tuple(msgspec.structs.replace(each, value=each.value + 1) for each in result.rewards)
        return msgspec.structs.replace(result, rewards=rewards)

    step = LookupEnvironment._step
    monkeypatch.setattr(LookupEnvironment, "_step", generous)
    code, facts = answer(monkeypatch, capsys, "suite", "run", str(suite))
    assert (code, facts["world"]) == (1, "changed")
    assert "(reward)" in facts["verdict"]


@pytest.mark.parametrize(("frozen", "verdict", "code"), [(1.0, "worse", 1), (-1.0, "better", 0)])
def test_the_model_changed(suite, monkeypatch, capsys, frozen, verdict, code):
    """As if who is frozen had always, or never, succeeded."""
    held = read_suite(str(suite))
    episodes = tuple(msgspec.structs.replace(each, score=frozen) for each in held.episodes)
    suite.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(held, episodes=episodes)))
    found, facts = answer(monkeypatch, capsys, "suite", "run", str(suite), "--run", "lookup", "--version", "0")
    assert (found, facts["world"], facts["model"]) == (code, "same", verdict)
    assert facts["p_value"] < 0.05


def test_wrong_files_and_options(suite, tmp_path, monkeypatch, capsys):
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    code, error = answer(monkeypatch, capsys, "suite", "freeze", "lookup", "--out", str(other))
    assert code == 2 and "is no replay suite" in error and other.read_text() == "mine"
    assert call_main(monkeypatch, "suite", "run", str(other)) == 1
    assert call_main(monkeypatch, "suite", "run", str(tmp_path / "none")) == 2
    assert call_main(monkeypatch, "suite", "run", str(suite), "--version", "3") == 2
    held = read_suite(str(suite))
    header = msgspec.structs.replace(held.header, schema_version=9)
    suite.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(held, header=header)))
    capsys.readouterr()
    assert call_main(monkeypatch, "suite", "run", str(suite)) == 1
    assert "schema 9; this build reads 1" in capsys.readouterr().err


def test_what_does_not_replay_now_is_not_frozen(work, root, tmp_path, monkeypatch):
    changed_world(monkeypatch)
    with pytest.raises(RunFailed, match="differs first at step 0"):
        asyncio.run(freeze(root, str(tmp_path / "suite"), 8, 0))
    assert not (tmp_path / "suite").exists()
