"""The filter of stored episodes: what it takes, and that nothing but comparisons gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.deploy.demonstrations.episode_filter import FIELDS, EpisodeFilter
from headrace.platform.errors import ConfigError

FACTS = {
    "score": 1.0,
    "turns": 3,
    "tokens": 40,
    "version": 7,
    "environment": "lookup",
    "split": "train",
    "purpose": "train",
    "status": "OK",
    "task_id": "lookup-train-3",
}

TAKEN = {
    "score >= 1": True,
    "score > 1": False,
    "score >= 1 and turns <= 3 and environment == 'lookup'": True,
    "score >= 1 and turns < 3": False,
    "turns < 3 or version == 7": True,
    "not turns < 3": True,
    "not (score >= 1 or turns > 5)": False,
    "1 <= turns <= 3": True,
    "1 <= turns < 3": False,
    "score > -0.5": True,
    "environment in ('maze', 'lookup')": True,
    "environment not in ['lookup']": False,
    "version in {7}": True,
    "status != 'OK'": False,
    "'lookup' == environment": True,
    "turns < tokens": True,
    "  score == 1.0\n": True,
}


@pytest.mark.parametrize("text", TAKEN)
def test_it_takes_what_it_says(text):
    assert EpisodeFilter(text).takes(FACTS) is TAKEN[text]


WRONG = {
    "": "cannot be read",
    "score >=": "cannot be read",
    "score = 1": "cannot be read",
    "score": "no comparison",
    "True": "no comparison",
    "'lookup'": "no comparison",
    "scores >= 1": "did you mean 'score'",
    "reward >= 1": "there is no 'reward'",
    "score >= '1'": "a number with a text",
    "environment == 3": "a text with a number",
    "environment in 'lookups'": "not known here",
    "score in (1, 'a')": "mixes numbers and texts",
    "environment in (1, 2)": "a text with a list of number",
    "score is 1": "not known here",
    "score >= True": "neither a name, a number nor a text",
    "score >= 1 + 1": "neither a name, a number nor a text",
    "score >= None": "neither a name",
    "score >= [1]": "not known here",
    "score in ()": "neither a name",
    "-'a' == environment": "neither a name",
    "__import__('os').system('true') == 0": "neither a name",
    "environment.upper() == 'LOOKUP'": "neither a name",
    "score[0] == 1": "neither a name",
    "(lambda: 1)() == 1": "neither a name",
    "[x for x in (1,)] == 1": "neither a name",
    "f'{score}' == '1'": "neither a name",
    "score if score else turns": "no comparison",
    "(score := 1) == 1": "neither a name",
}


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_refused_and_told_what_there_is(text):
    with pytest.raises(ConfigError, match=WRONG[text]) as refusal:
        EpisodeFilter(text)
    assert all(name in str(refusal.value) for name in FIELDS)


@given(st.text(max_size=40))
def test_no_text_does_anything_but_compare(text):
    try:
        taken = EpisodeFilter(text).takes(FACTS)
    except ConfigError:
        return
    assert isinstance(taken, bool)


def test_deep_nesting_is_refused_not_a_crash():
    with pytest.raises(ConfigError, match="cannot be read"):
        EpisodeFilter("(" * 100_000 + "score >= 1" + ")" * 100_000)
    assert EpisodeFilter("not " * 50 + "score >= 1").takes(FACTS)


def test_it_names_the_facts_that_it_looks_at():
    assert EpisodeFilter("score >= 1 and split == 'dev'").names == {"score", "split"}
