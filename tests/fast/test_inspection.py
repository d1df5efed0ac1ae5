"""`headrace inspect` and `headrace replay` on a finished run: what is told apart, and what a changed record shows."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from command_line import call_main
from run_kit import run_inprocess, small_config, stored

from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import HashPair
from headrace.platform.records.status import FaultOwner, Purpose, Role, Status, StopReason
from headrace.platform.records.tables import LossMaskReason, MaskedSpan, Receipt
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable, ReceiptTable, RewardTable

DIVERGED, USAGE = 1, 2


@pytest.fixture(scope="module")
def run(lookup_model, tmp_path_factory):
    """A finished run's summary and root."""
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs")))


@pytest.fixture
def show(run, monkeypatch, capsys):
    """Run a command on the run; its exit code and its last line as JSON."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(command: str, *args: str, root: RunRoot | None = None):
        assert call_main(monkeypatch, command, (root or run[1]).url, *args, "--json") in (0, DIVERGED)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def trained(root: RunRoot) -> list[Episode]:
    fates = FateTable(root.url).by_episode()
    return [e for e in stored(root) if e.episode_id in fates and fates[e.episode_id].fate == "trained"]


def with_tools(episodes: list[Episode], purpose: Purpose = Purpose.TRAIN) -> Episode:
    """An episode that read the store and then answered."""
    return next(
        e
        for e in episodes
        if e.purpose is purpose
        and e.stop_reason is StopReason.TERMINATED
        and len(e.turns) >= 4
        and e.status is Status.OK
    )


class TestARun:
    def test_facts(self, run, show):
        summary, root = run
        facts = show("inspect")
        assert (facts["run"], facts["summary"]) == (root.name, summary)
        assert facts["episode_count"] == len(stored(root))
        rows = {row["episode_id"]: row for row in facts["episodes"]}
        assert 0 < len(rows) <= facts["episode_count"]
        fates, rewards = FateTable(root.url).by_episode(), RewardTable(root.url).by_episode()
        for episode in stored(root):
            if row := rows.get(episode.episode_id):
                assert row["purpose"] == episode.purpose and row["version"] == episode.version.number
                assert row["score"] == sum(r.value for r in rewards[episode.episode_id])
                assert row["fate"].partition(":")[0] == (
                    fates[episode.episode_id].fate if episode.purpose is Purpose.TRAIN else ""
                )

    def test_text(self, run, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "80")
        _, root = run
        assert call_main(monkeypatch, "inspect", root.url) == 0
        out = capsys.readouterr().out
        assert "success_after" in out and "dispatched" in out
        shown = [e.episode_id for e in stored(root) if e.episode_id in out]
        assert shown, "ids are whole, so that they can be copied"


class TestAnEpisode:
    def test_tokens_are_told_apart(self, run, show):
        _, root = run
        episode = with_tools(trained(root))
        facts = show("inspect", episode.episode_id)
        assert len(facts["turns"]) == len(episode.turns)
        for fact, turn in zip(facts["turns"], episode.turns, strict=True):
            assert [token["id"] for token in fact["tokens"]] == turn.token_ids.tolist()
            kinds = [token["kind"] for token in fact["tokens"]]
            assert kinds == ["trained" if bit else "prompt" for bit in turn.action_mask]
            assert all((token["logprob"] == 0) == (token["kind"] == "prompt") for token in fact["tokens"])

    def test_what_the_loss_left_out_is_masked_and_what_was_not_trained_is_action(self, run, show, tmp_path):
        _, root = run
        episode = with_tools(trained(root))
        (index, turn) = next((i, t) for i, t in enumerate(episode.turns) if t.is_action)
        first = int(turn.action_mask.argmax())
        copy = copied(root, tmp_path)
        receipt = ReceiptTable(root.url).by_episode()[episode.episode_id][0]
        span = MaskedSpan(index, first, first + 1, LossMaskReason.LAG)
        ReceiptTable(copy.url, "learner-again").append(
            [msgspec.structs.replace(receipt, version=receipt.version + 1, masked=(span,))]
        )
        kinds = [t["kind"] for t in show("inspect", episode.episode_id, root=copy)["turns"][index]["tokens"]]
        assert kinds[first] == "masked" and kinds.count("masked") == 1
        evaluated = show("inspect", with_tools(stored(root), Purpose.EVAL).episode_id)
        assert {t["kind"] for turn in evaluated["turns"] for t in turn["tokens"]} == {"prompt", "action"}

    def test_who_when_and_how_it_ended(self, run, show):
        _, root = run
        episode = with_tools(trained(root))
        facts = show("inspect", episode.episode_id)
        receipt: Receipt = ReceiptTable(root.url).by_episode()[episode.episode_id][0]
        assert facts["fate"] == "trained"
        assert facts["status"] == "OK" and facts["stop_reason"] == "terminated" and facts["fault"] == "none"
        assert str(episode.version.number) in facts["version"]
        assert facts["final_state_hash"] == episode.final_state_hash != ""
        assert facts["score"] in (0.0, 1.0)
        assert [reward["kind"] for reward in facts["rewards"]] == ["outcome"]
        actions = [turn for turn in facts["turns"] if turn["role"] == "assistant"]
        assert tuple(turn["advantage"] for turn in actions) == receipt.advantages
        assert all(f"v{episode.version.number}[" in turn["versions"][0] for turn in actions)
        assert all(turn["state_hash"] for turn in actions)
        assert actions[0]["tool_calls"] and facts["turns"][0]["observation_hash"]

    def test_the_receipt_says_how_it_was_trained(self, run, show):
        _, root = run
        episode = with_tools(trained(root))
        receipt: Receipt = ReceiptTable(root.url).by_episode()[episode.episode_id][0]
        facts = show("inspect", episode.episode_id)["training"]
        assert facts["trained"] and (facts["version"], facts["step"]) == (receipt.version, receipt.step)
        assert facts["step"] >= 1 and facts["lag"] == receipt.lag and facts["advantages"] == list(receipt.advantages)
        assert facts["loss_tokens"] == facts["action_tokens"] > 0 and facts["unaccounted"] == 0
        evaluated = show("inspect", with_tools(stored(root), Purpose.EVAL).episode_id)["training"]
        assert not evaluated["trained"] and "purpose train" in evaluated["why"]

    def test_the_text_says_why_it_was_not_trained(self, run, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "200")
        _, root = run
        evaluated = with_tools(stored(root), Purpose.EVAL)
        assert call_main(monkeypatch, "inspect", root.url, evaluated.episode_id) == 0
        assert "not trained        it was played for eval" in capsys.readouterr().out

    def test_text_shows_every_turn(self, run, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "200")
        _, root = run
        episode = with_tools(trained(root))
        assert call_main(monkeypatch, "inspect", root.url, episode.episode_id) == 0
        out = capsys.readouterr().out
        assert all(f"turn {index} {turn.role}" in out for index, turn in enumerate(episode.turns))
        assert "learner step" in out and "sampled tokens" in out and "advantages" in out
        assert "trained" in out and "reward outcome" in out and episode.final_state_hash in out

    def test_words_are_shown_where_a_tokenizer_is_left(self, run, show):
        _, root = run
        episode = with_tools(trained(root))
        tokens = show("inspect", episode.episode_id)["turns"][0]["tokens"]
        assert "find" in "".join(token["text"] for token in tokens)

    def test_brackets_in_words_are_no_markup(self, run, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("COLUMNS", "200")
        _, root = run
        copy = copied(root, tmp_path)
        said = "the tool said [/bold] and [red]stop[/red]"
        replace_episode(
            copy,
            with_tools(trained(root)),
            fault=said,
            fault_owner=FaultOwner.ENVIRONMENT,
        )
        assert call_main(monkeypatch, "inspect", copy.url, with_tools(trained(root)).episode_id) == 0
        assert said in capsys.readouterr().out

    def test_the_shortest_unique_prefix_will_do(self, run, show):
        _, root = run
        episode = with_tools(trained(root))
        short = episode.episode_id.removeprefix(f"{root.name}.")
        assert show("inspect", short)["episode_id"] == episode.episode_id

    def test_a_prefix_of_many_lists_them(self, run, monkeypatch, capsys):
        assert call_main(monkeypatch, "inspect", run[1].url, "t") == USAGE
        assert f"{run[1].name}.t" in capsys.readouterr().err


def copied(root: RunRoot, folder: Path) -> RunRoot:
    """A copy of a run that may be spoilt."""
    return RunRoot(str(shutil.copytree(root.url, folder / root.name)))


def replace_episode(root: RunRoot, episode: Episode, **changes: object) -> None:
    """Store a changed record in the place of `episode`."""
    others = [e for e in EpisodeStore(root.url).iterate() if e.episode_id != episode.episode_id]
    shutil.rmtree(Path(root.url) / "episodes")
    changed = msgspec.structs.replace(episode, **changes)
    EpisodeStore(root.url).write([(e, episode_codec.encode(e)) for e in [*others, changed]], "forger")


class TestReplay:
    def test_real_episodes_replay_equal(self, run, show):
        _, root = run
        for episode in stored(root)[::25]:
            report = show("replay", episode.episode_id)
            assert report["equal"] and report["first_divergence"] is None and not report["differences"]
            assert report["steps"] == sum(turn.role is Role.ASSISTANT for turn in episode.turns)

    def test_text(self, run, monkeypatch, capsys):
        episode = with_tools(stored(run[1]))
        assert call_main(monkeypatch, "replay", run[1].url, episode.episode_id) == 0
        assert "no hash differs" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("what", "step"),
        [("observation_hash", 0), ("state_hash", 0), ("observation_hash", 1), ("state_hash", 1), ("state_hash", 2)],
    )
    def test_a_changed_record_is_found_at_its_step(self, run, what, step, show, tmp_path):
        """Step 0 is the reset, step n the answer to the n-th turn of the policy."""
        _, root = run
        episode = with_tools(stored(root))
        actions = [i for i, turn in enumerate(episode.turns) if turn.role is Role.ASSISTANT]
        index = 0 if step == 0 else actions[step - 1] + (what == "observation_hash")
        turns = list(episode.turns)
        turns[index] = msgspec.structs.replace(turns[index], **{what: HashPair("forged", "forged")})
        copy = copied(root, tmp_path)
        replace_episode(copy, episode, turns=tuple(turns))
        report = show("replay", episode.episode_id, root=copy)
        assert not report["equal"]
        assert report["first_divergence"] == step
        assert [difference["recorded"] for difference in report["differences"]] == ["forged"]

    def test_another_world_is_found_at_once(self, run, tmp_path, monkeypatch, capsys):
        _, root = run
        episode = with_tools(stored(root))
        other = {**episode.task.data, "chain": ["k00", *episode.task.data["chain"][1:]], "answer": "v00"}
        copy = copied(root, tmp_path)
        replace_episode(copy, episode, task=msgspec.structs.replace(episode.task, data=other))
        assert call_main(monkeypatch, "replay", copy.url, episode.episode_id) == DIVERGED
        assert "first divergence at step 0" in capsys.readouterr().out

    def test_another_environment_version_is_refused(self, run, tmp_path, monkeypatch, capsys):
        _, root = run
        episode = with_tools(stored(root))
        copy = copied(root, tmp_path)
        replace_episode(copy, episode, environment_version="0")
        assert call_main(monkeypatch, "replay", copy.url, episode.episode_id) == USAGE
        assert "version 0" in capsys.readouterr().err
