"""What replays and suites make of graders that changed, hosts that are gone, and orders that cannot be carried out."""

import asyncio
import dataclasses
import itertools
import json

import msgspec
import pytest
from command_line import call_main, last_json
from episode_kit import lookup_renderer, lookup_solution, lookup_task, lookup_words, make_plan, play, says

from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.scoring.pool import build_scorer_process
from headrace.deploy import replaying
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.replaying import replay_all, run_config
from headrace.deploy.suites import check_out, check_world, freeze, read_suite, verdict
from headrace.platform.config.environments import EnvironmentConfig, ScorerConfig
from headrace.platform.config.load import dump_yaml, load_recipe
from headrace.platform.errors import ConfigError, HostAway, RunFailed, SandboxDied
from headrace.platform.records import (
    AttemptId,
    Provenance,
    Purpose,
    RewardComponent,
    RewardKind,
    RewardRow,
    SamplingParams,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable

RUN = "lookup-1a2b3c"
JUDGE = """
from headrace import RewardComponent, RewardKind
class Judge:
    version = "1"
    def score(self, task, episode):
        return (RewardComponent(RewardKind.PROCESS, {value}),)
    def score_group(self, task, episodes):
        return [self.score(task, each) for each in episodes]
"""


class Grader:
    """Gives these values one after the other, the last one for ever; None is a failure."""

    def __init__(self, *values, version="judge-1"):
        self.values, self.version, self.asked = list(values), version, 0

    async def score(self, task, episode):
        self.asked += 1
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        return (RewardComponent(RewardKind.PROCESS, value or 0.0, valid=value is not None, evidence="it timed out"),)

    async def close(self):
        pass


async def played(renderer, number, purpose=Purpose.EVAL, grader=None, texts=()):
    task = lookup_task(number)
    replies = lookup_words(renderer, *texts) if texts else lookup_solution(renderer, task)
    plan = make_plan(
        task,
        attempt_id=AttemptId(RUN, number, 0, 0, purpose),
        sampling=SamplingParams(16, stop_token_ids=renderer.stop_token_ids),
    )
    return await play(LookupEnvironment(), says(*replies), renderer, plan, grader)


def stored_run(folder, plays, scorer=None):
    """A run of lookup that holds what was played."""
    config = load_recipe("lookup", ["sft=null"], recipes_dir())
    environments = tuple(each.model_copy(update={"scorer": scorer}) for each in config.environments)
    text = dump_yaml(config.model_copy(update={"environments": environments}))
    root = RunRoot.create(str(folder / "runs"), RUN, text)
    EpisodeStore(root.url).write([(each.episode, episode_codec.encode(each.episode)) for each in plays], "w")
    RewardTable(root.url, "w").append([row for each in plays for row in each.rewards])
    return root


@pytest.fixture
def renderer(tmp_path):
    folder = tmp_path / "renderer"
    folder.mkdir()
    return lookup_renderer(folder)


@pytest.fixture
async def plays(renderer):
    return [await played(renderer, number) for number in range(6)]


async def replay(plays, **options):
    episodes = [each.episode for each in plays]
    return await replay_all(episodes, [EnvironmentConfig(name="lookup")], 0, **options)


# --- graders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("today", "diverged", "interrupted"),
    [
        (Grader(1.0), 0, 0),
        (Grader(0.5), 1, 0),
        (Grader(1.0, version="judge-2"), 1, 0),
        (None, 1, 0),
        (Grader(None, 1.0), 0, 0),
        (Grader(None), 0, 1),
        (Grader(None, version="judge-2"), 1, 0),
    ],
)
async def test_a_grader_that_gives_something_else_is_a_difference_of_the_world(renderer, today, diverged, interrupted):
    one = await played(renderer, 0, grader=Grader(1.0))
    rewards = {one.episode.episode_id: one.rewards}
    graders = {} if today is None else {"lookup": today}
    tally = await replay([one], rewards=rewards, graders=graders)
    assert (tally.diverged, tally.interruptions) == (diverged, interrupted)
    if diverged:
        assert [(each.step, each.what) for each in tally.reports[0].differences] == [(3, "grader")]
    if interrupted:
        assert "the grader judge-1 failed: it timed out" in next(iter(tally.interrupted.values()))
    assert (await replay([one], rewards=rewards)).equal, "nobody is graded who was not asked for"


class TwoGrades(Grader):
    """Gives all its values at once, each a component of one kind."""

    async def score(self, task, episode):
        return tuple(RewardComponent(RewardKind.PROCESS, value) for value in self.values)


@pytest.mark.parametrize(
    ("today", "diverged"), [((0.2, 0.8), 0), ((0.8, 0.2), 0), ((0.8,), 1), ((0.5, 0.8), 1), ((0.2, 0.8, 0.8), 1)]
)
async def test_all_grades_of_one_kind_are_compared(renderer, tmp_path, today, diverged):
    one = await played(renderer, 0, grader=TwoGrades(0.2, 0.8))
    RewardTable(str(tmp_path), "w").append(one.rewards)
    rewards = RewardTable(str(tmp_path)).by_episode()
    assert (await replay([one], rewards=rewards, graders={"lookup": TwoGrades(*today)})).diverged == diverged


async def test_a_grade_that_was_never_given_is_not_compared(renderer):
    failed = await played(renderer, 0, grader=Grader(None))
    unrewarded = await played(renderer, 1)
    rewards = {each.episode.episode_id: each.rewards for each in (failed, unrewarded)}
    grader = Grader(1.0)
    tally = await replay([failed], rewards=rewards, graders={"lookup": grader})
    assert tally.equal
    tally = await replay([unrewarded], rewards=rewards, graders={"lookup": grader})
    assert tally.diverged == 1, "it has a grader now"
    tally = await replay([unrewarded], rewards=rewards, graders={})
    assert (tally.equal, grader.asked) == (True, 2)


async def test_a_changed_grader_is_a_changed_world_and_not_a_worse_model(renderer, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE.format(value=1.0))
    scorer = ScorerConfig(kind=f"{judge}:Judge")
    grader = Grader(1.0, version=build_scorer_process(scorer).version)
    plays = [await played(renderer, number, grader=grader) for number in range(3)]
    root = stored_run(tmp_path, plays, scorer)
    file = str(tmp_path / "suite.msgpack")
    await freeze(root, file, 3, 0)
    suite = read_suite(file)
    judge.write_text(JUDGE.format(value=0.0))
    tally = await check_world(suite)
    facts = verdict(suite, tally, None)
    assert (facts["world"], tally.diverged) == ("changed", 3)
    assert "(grader)" in facts["verdict"]


async def test_what_is_graded_otherwise_now_is_not_frozen(renderer, tmp_path):
    root = stored_run(tmp_path, [await played(renderer, 0, grader=Grader(1.0))])
    with pytest.raises(RunFailed, match=r"differs first at step 3 \(grader\)"):
        await freeze(root, str(tmp_path / "suite"), 1, 0)
    assert not (tmp_path / "suite").exists()


# --- what is no fault of the world ------------------------------------------------------------------------------------


class Session(LookupEnvironment):
    """Breaks at its first step, by `error`."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    async def _step(self, message):
        if self.error is not None:
            raise self.error
        return await super()._step(message)


class Nowhere(LookupEnvironment):
    """No host takes it."""

    async def _reset(self, task, seed):
        await asyncio.sleep(0)
        raise HostAway("lookup: no host took a session within 27 s")


def sessions(monkeypatch, *made):
    """What replays are played in, one after the other; the last one of `made` makes all that follow."""
    makers = itertools.chain(made, itertools.repeat(made[-1]))
    monkeypatch.setattr("headrace.actors.worlds.Worlds._played", lambda self, config, group: next(makers)())


async def test_what_is_gone_once_is_tried_again_in_a_fresh_session_under_other_keys(plays, monkeypatch):
    keys = []

    class Noting(Session):
        async def step(self, message, key):
            keys.append(key)
            return await super().step(message, key)

    sessions(monkeypatch, lambda: Noting(SandboxDied("gone")), Noting)
    tally = await replay(plays[:1])
    assert (tally.equal, tally.episodes) == (True, 1)
    assert len({key.rsplit("/", 1)[0] for key in keys}) == 2, "P26: the second try is another branch"


async def test_what_is_gone_twice_is_not_compared_and_never_diverged(plays, monkeypatch):
    sessions(monkeypatch, *[lambda: Session(HostAway("gone"))] * 2, Session)
    tally = await replay(plays, at_once=1)
    assert (tally.equal, tally.episodes, tally.diverged, tally.refusals) == (False, 6, 0, 0)
    assert tally.interrupted == {plays[0].episode.episode_id: "step 1: HostAway: gone"}
    assert (tally.interruptions, tally.not_compared, tally.stopped) == (1, 1, "")


async def test_hosts_that_are_gone_end_the_replay_after_a_few(plays, monkeypatch):
    sessions(monkeypatch, Nowhere)
    taken = []
    episodes = (taken.append(each) or each.episode for each in itertools.islice(itertools.cycle(plays), 1000))
    tally = await replay_all(episodes, [EnvironmentConfig(name="lookup")], 0, at_once=2)
    assert (tally.equal, 3 <= tally.interruptions <= 4, len(taken) < 8) == (False, True, True)
    assert "3 episodes in a row found no host of lookup" in tally.stopped
    assert "no host took a session" in tally.stopped


async def test_hosts_that_are_busy_with_this_replay_are_waited_for(plays, monkeypatch):
    free = asyncio.Semaphore(1)

    class Busy(Session):
        provenance = Provenance()
        is_taken = False

        async def _reset(self, task, seed):
            await asyncio.sleep(0)
            if free.locked():
                raise HostAway("no host took a session: full")
            await free.acquire()
            self.is_taken, self.provenance = True, Provenance(pool="ws://one")
            return await super()._reset(task, seed)

        async def _step(self, message):
            await asyncio.sleep(0.001)
            return await super()._step(message)

        async def close(self):
            if self.is_taken:
                free.release()

    sessions(monkeypatch, Busy)
    tally = await replay(plays, at_once=6)
    assert (tally.equal, tally.episodes, tally.stopped) == (True, 6, "")


async def test_a_suite_whose_world_could_not_be_tried_claims_nothing(plays, tmp_path, monkeypatch):
    file = str(tmp_path / "suite")
    await freeze(stored_run(tmp_path, plays), file, 6, 0)
    suite = read_suite(file)
    for made, told in ((Nowhere, "no host took a session"), (lambda: Session(SandboxDied("full disk")), "full disk")):
        sessions(monkeypatch, made)
        facts = verdict(suite, await check_world(suite), None)
        assert facts["world"] == "not tried"
        count = len(suite.episodes)
        assert facts["verdict"].startswith(f"the world could not be tried: {count} of {count} episodes; ")
        assert told in facts["verdict"] and "(0 episodes replayed)" in facts["verdict"]


async def test_news_come_while_episodes_are_replayed(plays, monkeypatch):
    monkeypatch.setattr(replaying, "_NEWS_S", 0.001)
    told, heard = [], asyncio.Event()

    class Slow(Session):
        async def _step(self, message):
            await heard.wait()
            return await super()._step(message)

    def news(tally):
        told.append(tally.episodes)
        heard.set()

    sessions(monkeypatch, Slow)
    assert (await replay(plays, news=news)).equal
    assert told[0] == 0


# --- the command line -------------------------------------------------------------------------------------------------


def command(monkeypatch, capsys, *args):
    capsys.readouterr()
    code = call_main(monkeypatch, *args)
    return code, capsys.readouterr()


def test_a_run_without_hosts_fails_with_one_error(plays, tmp_path, monkeypatch, capsys):
    stored_run(tmp_path, plays)
    monkeypatch.chdir(tmp_path)
    sessions(monkeypatch, Nowhere)
    code, said = command(monkeypatch, capsys, "replay", "lookup")
    assert (code, said.out) == (1, "")
    assert "given up after 0 compared episodes" in said.err and said.err.count("\n") == 1
    code, said = command(monkeypatch, capsys, "suite", "run", "none")
    assert code == 2


def test_what_is_interrupted_is_named_and_makes_the_exit_code_one(plays, tmp_path, monkeypatch, capsys):
    stored_run(tmp_path, plays)
    monkeypatch.chdir(tmp_path)
    sessions(monkeypatch, lambda: Session(SandboxDied("out of memory")))
    code, said = command(monkeypatch, capsys, "replay", "lookup", "--json")
    facts = last_json(said.out)
    assert (code, facts["interrupted"], facts["diverged"], facts["equal"]) == (1, 6, 0, False)
    code, said = command(monkeypatch, capsys, "replay", "lookup")
    assert code == 1
    assert "0 of 6 episodes replay equal" in said.out and "6 interrupted" in said.out
    assert "not compared, as it was interrupted twice: step 1: SandboxDied: out of memory" in said.out
    code, said = command(monkeypatch, capsys, "replay", "lookup", plays[0].episode.episode_id, "--json")
    assert (code, last_json(said.out)["interrupted"]) == (1, "step 1: SandboxDied: out of memory")


def test_a_run_says_how_far_its_replay_is(plays, tmp_path, monkeypatch, capsys):
    stored_run(tmp_path, plays)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replaying, "_NEWS_S", 0.0)
    code, said = command(monkeypatch, capsys, "replay", "lookup", "--json")
    assert (code, json.loads(said.out)["episodes"]) == (0, 6)
    assert "episodes replayed, 0 diverged, 0 not compared" in said.err


def test_replay_compares_the_rewards_of_the_world_and_not_of_graders(plays, tmp_path, monkeypatch, capsys):
    root = stored_run(tmp_path, plays)
    graded = plays[0].episode.episode_id
    row = RewardRow(episode_id=graded, kind=RewardKind.PROCESS, value=0.3, grader_version="judge-9")
    RewardTable(root.url, "other").append([row])
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, capsys, "replay", "lookup")[0] == 0
    step = LookupEnvironment._step

    async def generous(self, message):
        result = await step(self, message)
        rewards = tuple(msgspec.structs.replace(each, value=each.value + 1) for each in result.rewards)
        return msgspec.structs.replace(result, rewards=rewards)

    monkeypatch.setattr(LookupEnvironment, "_step", generous)
    code, said = command(monkeypatch, capsys, "replay", "lookup", graded)
    assert code == 1 and "step 3: reward" in said.out and "+outcome 2.0" in said.out


async def test_rewards_that_the_table_does_not_know_are_not_compared(plays, tmp_path):
    assert (await replay(plays, rewards={})).equal


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_the_smallest_suite_has_something_to_compare(plays, tmp_path, count):
    suite = await freeze(stored_run(tmp_path, plays), str(tmp_path / "suite"), count, 0)
    assert 1 <= sum(each.compared for each in suite.episodes) <= len(suite.episodes) <= count
    assert suite.header.success == 1.0


async def test_a_suite_on_which_nothing_can_be_compared_says_so(renderer, tmp_path, monkeypatch):
    from headrace.platform.records.episode import InjectedFault

    monkeypatch.setattr(
        "headrace.actors.worlds.with_recorded_faults", lambda session, injected: session
    )  # as if it had met some that change nothing
    one = await played(renderer, 0, Purpose.TRAIN)
    episode = msgspec.structs.replace(one.episode, injected_faults=(InjectedFault(1, "timeout"),))
    root = stored_run(tmp_path, [dataclasses.replace(one, episode=episode)])
    assert run_config(root).environments[0].name == "lookup"
    suite = await freeze(root, str(tmp_path / "suite"), 1, 0)
    assert [each.compared for each in suite.episodes] == [False]


def test_the_command_line_says_that_nothing_can_be_compared(plays, tmp_path, monkeypatch, capsys):
    root = stored_run(tmp_path, plays)
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "suite")
    assert command(monkeypatch, capsys, "suite", "freeze", "lookup", "--out", file, "--episodes", "4")[0] == 0
    held = read_suite(file)
    unscored = tuple(msgspec.structs.replace(each, score=None) for each in held.episodes)
    (tmp_path / "suite").write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(held, episodes=unscored)))
    code, said = command(monkeypatch, capsys, "suite", "run", file, "--run", root.name)
    assert code == 2 and "has a score" in said.err and "leave out --run" in said.err
    assert command(monkeypatch, capsys, "suite", "run", file)[0] == 0
    monkeypatch.setattr("headrace.deploy.suites._score", lambda episode, rewards: None)
    code, said = command(monkeypatch, capsys, "suite", "freeze", "lookup", "--out", file)
    assert code == 0 and "No policy can be compared on this suite" in said.out


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_replayed(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_file").write_text("mine")
    for out, told in (
        (str(tmp_path), "is a folder"),
        (f"file://{tmp_path}/", "is a folder"),
        (str(tmp_path / "a_file" / "suite"), "cannot be written"),
        ("/proc/headrace/suite", "cannot be written"),
        (str(tmp_path / "a_file"), "is no replay suite"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_out(out)
        monkeypatch.chdir(tmp_path)
        code, said = command(monkeypatch, capsys, "suite", "freeze", "none", "--out", out)
        assert code == 2 and told in said.err
    check_out(str(tmp_path / "new" / "folder" / "suite"))
    check_out("memory://somewhere/suite")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a_file"]
