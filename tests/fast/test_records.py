import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.platform import errors
from headrace.platform.records import AttemptId, Purpose, RewardKind, RewardRow, Role, Status, UpdateMode
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
numbers = st.integers(0, 2**40)


@settings(deadline=None)
@given(names, numbers, numbers, numbers, st.sampled_from(Purpose))
def test_an_attempt_id_survives_its_text(run, group, sample, attempt, purpose):
    attempt_id = AttemptId(run, group, sample, attempt, purpose)
    assert AttemptId.parse(str(attempt_id)) == attempt_id


def test_attempt_ids():
    first = AttemptId("lookup-1f", 12, 3)
    assert str(first) == "lookup-1f.t12.3.0"
    assert str(first.next_attempt()) == "lookup-1f.t12.3.1"
    assert str(AttemptId("a.b", 1, 2, 3, Purpose.REPLAY)) == "a.b.r1.2.3"


@pytest.mark.parametrize("text", ["", "a", "run.t1.2", "run.x1.2.3", "run.t.2.3", "run.t1.two.3"])
def test_what_is_not_an_attempt_id(text):
    with pytest.raises(ValueError, match="is not an episode id"):
        AttemptId.parse(text)


def test_statuses_answer_questions():
    assert {status for status in Status if status.is_error} == {Status.ENV_BUG, Status.ENV_TRANSIENT}
    assert {status for status in Status if status.is_retryable} == {Status.ENV_TRANSIENT}
    assert {status for status in Status if status.is_truncated} == {Status.BUDGET_EXHAUSTED}


def test_a_reward_row_has_a_value_exactly_when_it_is_valid():
    with pytest.raises(ValueError, match="failure is never a reward"):
        RewardRow(episode_id="a", kind=RewardKind.OUTCOME, value=0.0, valid=False)
    with pytest.raises(ValueError, match="failure is never a reward"):
        RewardRow(episode_id="a", kind=RewardKind.OUTCOME, value=None)


# case T20
def test_the_oldest_version_is_taken_over_action_tokens_only():
    turns = (plain_turn(Role.USER), policy_turn(version=7), plain_turn(Role.TOOL), policy_turn(version=5))
    episode = make_episode(turns, version=7, update_mode=UpdateMode.TURN)
    assert episode.oldest_version == 5
    assert episode.action_tokens == 6
    assert make_episode((plain_turn(Role.USER),)).oldest_version is None
    assert [turn.is_action for turn in turns] == [False, True, False, True]


def test_records_are_frozen():
    with pytest.raises(AttributeError):
        make_episode().seed = 3
    assert msgspec.structs.replace(make_episode(), seed=3).seed == 3


def leaves(kind):
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


@pytest.mark.parametrize("kind", leaves(errors.HeadraceError))
def test_errors_pickle_and_are_builtins_too(kind):
    error = kind("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what happened"
    assert isinstance(error, ValueError | TimeoutError | LookupError | RuntimeError)
