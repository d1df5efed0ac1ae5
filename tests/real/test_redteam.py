"""Every attack of the catalogue, through a real gateway process, a real guard and real boxes (issue 6): nothing gets
through, every control has its effect, and nothing leaves this host."""

import pytest
from command_line import environment, last_json, run

from headrace.actors.gateway.redteam.catalogue import ATTACKS
from headrace.actors.gateway.redteam.sites import PUBLIC

ALLOWED = {PUBLIC, "127.0.0.1", "127.0.0.2"}
"""What attacks may dial: the one public address that names resolve to, and what their own policies list."""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    code, out, err = run(
        tmp_path_factory.mktemp("redteam"), "redteam", "run", "--json", timeout_s=280, env=environment()
    )
    assert out, err
    return code, last_json(out)


def test_nothing_gets_through(played):
    code, facts = played
    assert [each for each in facts["results"] if each["outcome"] != "blocked"] == []
    assert code == 0 and facts["holds"] and facts["attacks"] == len(ATTACKS) >= 60


def test_every_class_shows_that_its_attacks_would_have_an_effect(played):
    _, facts = played
    assert len(facts["classes"]) == 12
    for each in facts["classes"]:
        assert each["proven"] == each["controls"] > 0, each


def test_no_connection_but_to_loopback_is_opened(played):
    _, facts = played
    assert facts["tried"] == []
    assert set(facts["dialled"]) <= ALLOWED
