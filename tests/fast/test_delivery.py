"""From a played episode to its place in the store and the books."""

import msgspec
import numpy as np
import pytest
from episode_kit import DONE, World, ends, goes_on, make_plan, play, raises, says

from headrace.actors.attempts import Cancelled
from headrace.actors.delivery import Delivery
from headrace.actors.episode import play_episode
from headrace.actors.outbox import Outbox
from headrace.platform.errors import EnvironmentFault
from headrace.platform.hashing import digest
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import AttemptId, Message, Observation, Purpose, RewardComponent, RewardKind, Role
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import CommitRequest, LedgerLimits, Outcome, Verdict
from headrace.platform.records.status import CancelReason
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.fakes.renderer import CharRenderer

RUN = "kit-run"


class Keeping(MemoryLedger):
    """Keeps what was put."""

    def __init__(self, **limits):
        values = {"batch_groups": 8, "max_lag": 4, "drop_zero_variance": False, **limits}
        super().__init__(RUN, LedgerLimits(**values), lambda: 100.0)
        self.calls = []

    async def put(self, submissions):
        self.calls.append(list(submissions))
        return await super().put(submissions)


async def opened(tmp_path, size=4, **limits):
    """A delivery whose ledger has one group of `size` in flight."""
    ledger = Keeping(**limits)
    fence = await ledger.acquire_learner("test")
    number = await ledger.stage(fence)
    await ledger.commit(CommitRequest(fence=fence, number=number, parent=-1, content_hash="h", batches=0, fates={}))
    assert (await ledger.admit(number, size, 1, "rollout-0/1")).tickets
    return Delivery(
        ledger=ledger,
        store=EpisodeStore(str(tmp_path)),
        rewards=RewardTable(str(tmp_path), "rollout-0"),
        worker_id="rollout-0",
        outbox=Outbox(tmp_path / "outbox", RUN),
    )


def rewards_in(tmp_path):
    return {row.episode_id: row for row in RewardTable(str(tmp_path)).rows()}


async def played(sample=0, world=None, purpose=Purpose.TRAIN, **fields):
    plan = make_plan(attempt_id=AttemptId(RUN, 0, sample, 0, purpose), **fields)
    return await play(world or World(), says(DONE), plan=plan)


async def test_an_episode_is_stored_before_it_is_put(tmp_path):
    """P9: the file that the submission names holds the payload when the ledger hears of it."""
    delivery = await opened(tmp_path)
    whole = await played()

    class Looking(Keeping):
        async def put(self, submissions):
            (one,) = submissions
            assert delivery.store.read(one.store_file, [str(one.attempt_id)]) == [one.payload]
            return await super().put(submissions)

    delivery.ledger.__class__ = Looking
    ((attempt_id, reply),) = await delivery.deliver([whole])
    (submission,) = delivery.ledger.calls[0]
    assert (attempt_id, reply.verdict) == (whole.episode.attempt_id, Verdict.ACCEPTED)
    assert (submission.outcome, submission.score, submission.oldest_version) == (Outcome.DONE, 1.0, 0)
    assert (submission.newest_version, submission.environment) == (0, "world@1")  # P17
    assert submission.action_tokens == whole.episode.action_tokens
    assert submission.payload_hash == digest(submission.payload)
    assert episode_codec.decode(submission.payload).turns[1].token_ids.tolist() == DONE


async def test_a_batch_is_one_file_and_one_call(tmp_path):
    delivery = await opened(tmp_path)
    replies = await delivery.deliver([await played(sample) for sample in range(4)])
    assert [reply.verdict for _, reply in replies] == [Verdict.ACCEPTED] * 4
    assert [len(call) for call in delivery.ledger.calls] == [4]
    assert len(list(tmp_path.glob("episodes/*/*.parquet"))) == 1
    assert len(rewards_in(tmp_path)) == 4


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.REPLAY])
async def test_episodes_of_another_purpose_are_stored_and_never_put(tmp_path, purpose):
    delivery = await opened(tmp_path)
    other, training = await played(1, purpose=purpose), await played(0)
    replies = await delivery.deliver([other, training])
    assert [attempt_id for attempt_id, _ in replies] == [training.episode.attempt_id]
    assert delivery.store.find(other.episode.episode_id).purpose is purpose
    assert await delivery.deliver([await played(2, purpose=purpose)]) == []


@pytest.mark.parametrize(
    ("world", "owner", "reason", "verdict"),
    [
        (World(raises(EnvironmentFault("lost"))), "environment", "EnvironmentFault: lost", Verdict.RETRY),
        (World(raises(KeyError("k"))), "environment", "KeyError: 'k'", Verdict.ACCEPTED),
        (World(lambda _: ends(float("nan"))), "environment", "", Verdict.ACCEPTED),
    ],
)
async def test_what_has_no_reward_is_a_failure_and_tried_again_if_it_may_pass(tmp_path, world, owner, reason, verdict):
    delivery = await opened(tmp_path)
    ((_, reply),) = await delivery.deliver([await played(world=world)])
    ((submission,),) = delivery.ledger.calls
    assert (submission.outcome, submission.owner) == (Outcome.FAILED, owner)
    assert submission.reason.endswith(reason)
    assert (submission.payload, submission.score, reply.verdict) == (b"", 0.0, verdict)
    assert submission.action_tokens == len(DONE)
    assert reply.next_attempt == (1 if verdict is Verdict.RETRY else 0)
    stats = await delivery.ledger.stats()
    assert stats.holds
    assert (stats.fates["failed:environment"], stats.score_count) == (1, 0)
    assert delivery.store.find("kit-run.t0.0.0").task.task_id == "t", "a failed episode is stored too"


class NoWireForm:
    pass


@pytest.mark.parametrize(
    "metadata", [{"x": NoWireForm()}, {"x": "\ud800"}, {"\ud800": 1}, {"x": 2**70}, {"x": np.zeros(3, np.int64)}]
)
async def test_an_episode_that_no_store_takes_fails_alone(tmp_path, metadata):
    delivery = await opened(tmp_path)
    opening = Observation((Message(Role.USER, "go"),), metadata=metadata)
    plan = make_plan(attempt_id=AttemptId(RUN, 0, 1))
    bad = await play_episode(plan, World(reset=lambda: opening), CharRenderer(), says(DONE))
    replies = await delivery.deliver([await played(0), bad, await played(2)])
    assert [reply.verdict for _, reply in replies] == [Verdict.ACCEPTED] * 3, "a bug is not tried again"
    failed = delivery.ledger.calls[0][1]
    assert (failed.outcome, failed.owner) == (Outcome.FAILED, "environment")
    assert failed.reason.startswith("the episode cannot be stored: ")
    assert "kit-run.t0.1.0" not in rewards_in(tmp_path), "what has no episode has no reward"
    assert len(rewards_in(tmp_path)) == 2
    assert delivery.store.find("kit-run.t0.1.0").fault == failed.reason


async def test_evidence_that_is_no_text_is_stored_as_text(tmp_path):
    delivery = await opened(tmp_path)
    reward = RewardComponent(RewardKind.PROCESS, 1.0, evidence="because \ud800")
    answers = iter([goes_on(rewards=(reward,)), ends(0.0)])
    await delivery.deliver([await played(world=World(lambda _: next(answers)))])
    rows = [row for row in RewardTable(str(tmp_path)).rows() if row.kind is RewardKind.PROCESS]
    assert [row.evidence for row in rows] == ["because ?"]


async def test_a_refused_put_is_a_reply_like_any_other(tmp_path):
    delivery = await opened(tmp_path)
    first = await played()
    await delivery.deliver([first])
    replies = await delivery.deliver([first, await played(1)])
    assert [reply.verdict for _, reply in replies] == [Verdict.DUPLICATE, Verdict.ACCEPTED]
    assert (await delivery.ledger.stats()).refused == {"duplicate": 1}


async def test_every_put_is_in_the_outbox_before_it_is_made(tmp_path):
    """P11: done, failed and cancelled alike, without their payloads; P9: the file that they name is there."""
    delivery = await opened(tmp_path)

    class Looking(Keeping):
        async def put(self, submissions):
            kept = [entry.submission for entry in Outbox(tmp_path / "outbox", RUN).entries()]
            assert kept == [msgspec.structs.replace(each, payload=b"") for each in submissions]
            assert [each.outcome for each in kept] == [Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED]
            done = submissions[0]
            assert delivery.store.read(kept[0].store_file, [str(done.attempt_id)]) == [done.payload]
            return await super().put(submissions)

    delivery.ledger.__class__ = Looking
    failed = await played(1, World(raises(KeyError("k"))))
    cancelled = Cancelled(AttemptId(RUN, 0, 2), CancelReason.LAG)
    assert [entry.answered_s for entry in delivery.outbox.entries()] == []
    replies = await delivery.deliver([await played(), failed], [cancelled])
    assert [reply.verdict for _, reply in replies] == [Verdict.ACCEPTED] * 3
    assert all(entry.answered_s is not None for entry in delivery.outbox.entries())
    assert (await delivery.ledger.stats()).fates["cancelled:lag"] == 1


async def test_what_is_only_cancelled_needs_no_file(tmp_path):
    delivery = await opened(tmp_path)
    await delivery.deliver([], [Cancelled(AttemptId(RUN, 0, 2), CancelReason.STOPPED)])
    assert list(delivery.store.iterate()) == []
    assert (await delivery.ledger.stats()).fates["cancelled:stopped"] == 1


async def test_an_evaluation_has_no_place_in_the_outbox(tmp_path):
    delivery = await opened(tmp_path)
    await delivery.deliver([await played(purpose=Purpose.EVAL)])
    assert len(delivery.outbox) == 0


async def test_without_an_outbox_all_goes_the_same_way(tmp_path):
    delivery = await opened(tmp_path)
    delivery.outbox = None
    ((_, reply),) = await delivery.deliver([await played()])
    assert reply.verdict is Verdict.ACCEPTED


async def test_several_groups_in_one_put(tmp_path):
    """case Q15: what ended meanwhile goes in one call, and each attempt has its own answer."""
    delivery = await opened(tmp_path, max_attempts=2)
    await delivery.ledger.admit(0, 4, 2, "rollout-0/1")
    ends_of = {0: World(), 1: World(raises(EnvironmentFault("lost"))), 2: World(raises(KeyError("k")))}
    batch = [
        await play(world, says(DONE), plan=make_plan(attempt_id=AttemptId(RUN, group, 0)))
        for group, world in ends_of.items()
    ]
    replies = await delivery.deliver(batch, [Cancelled(AttemptId(RUN, 2, 1), CancelReason.STOPPED)])
    assert len(delivery.ledger.calls) == 1
    verdicts = {str(attempt_id): reply.verdict for attempt_id, reply in replies}
    assert verdicts == {
        "kit-run.t0.0.0": Verdict.ACCEPTED,
        "kit-run.t1.0.0": Verdict.RETRY,
        "kit-run.t2.0.0": Verdict.ACCEPTED,
        "kit-run.t2.1.0": Verdict.ACCEPTED,
    }


class Death(BaseException):
    """Stands for the kill at a failpoint; the real one is tested with real processes."""


@pytest.mark.parametrize(
    ("point", "stored", "kept", "put"),
    [("after_store", 1, 0, 0), ("after_outbox", 1, 1, 0), ("after_put", 1, 1, 1)],
)
async def test_a_death_between_two_steps_leaves_what_was_done_before(tmp_path, monkeypatch, point, stored, kept, put):
    """P9, P11: each step is durable before the next begins."""
    delivery = await opened(tmp_path)
    whole = await played()

    def dies(name):
        if name == point:
            raise Death

    monkeypatch.setattr("headrace.actors.delivery.failpoint", dies)
    with pytest.raises(Death):
        await delivery.deliver([whole])
    assert len(list(delivery.store.iterate())) == stored
    assert len(Outbox(tmp_path / "outbox", RUN)) == kept
    assert len(delivery.ledger.calls) == put
