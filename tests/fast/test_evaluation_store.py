"""Stored evaluations: names that nobody else has, whole files, and how people refer to them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from evaluation_kit import evaluation, outcome

from headrace.platform.errors import ConfigError, NotFound, SchemaError
from headrace.platform.store.evaluations import MOST_SAMPLES, EvaluationStore, evaluation_name, find_evaluation
from headrace.platform.store.run_root import RunRoot


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    """A store on a disk, and one on an object store without rename."""
    return EvaluationStore(str(tmp_path) if request.param == "local" else f"memory://{tmp_path}")


def stored(store, name, **fields):
    made = evaluation([outcome("a", 0.5), outcome("b", None)], name=name, **fields)
    store.write(made)
    return made


def test_what_was_written_is_read(store):
    made = stored(store, "v000003-dev-01")
    assert store.read("v000003-dev-01") == made
    assert store.names() == ["v000003-dev-01"]
    with pytest.raises(NotFound, match=r"v000003-dev-02.*v000003-dev-01"):
        store.read("v000003-dev-02")


def test_the_newest_is_by_time_not_by_version(store):
    stored(store, "v000009-dev-01", version=9, created_at_s=1.0)
    stored(store, "v000002-dev-02", version=2, created_at_s=3.0)
    stored(store, "v000002-dev-03", version=2, created_at_s=2.0)
    assert store.latest().name == "v000002-dev-02"
    assert store.latest(9).name == "v000009-dev-01"
    with pytest.raises(NotFound, match=r"no evaluation of version 4; there are v000002-dev-02"):
        store.latest(4)


def test_an_empty_run_has_none(store):
    assert store.names() == []
    with pytest.raises(NotFound, match="has no evaluation"):
        store.latest()


def test_claims_are_exclusive_between_processes(tmp_path):
    stores = [EvaluationStore(str(tmp_path)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda each: each.claim(4, "dev", 3), stores * 4))
    assert {claim.number for claim in claims} == set(range(1, 33))
    assert len({claim.name for claim in claims}) == len({claim.index for claim in claims}) == 32


def test_a_claim_knows_what_lies_there_already(store):
    stored(store, "v000003-dev-07")
    assert store.claim(3, "dev", 1).name == "v000003-dev-08"
    assert store.claim(None, "hidden", 1).name == "model-hidden-09"


def test_no_two_evaluations_share_an_episode_id(store):
    """The id of an evaluation episode holds its position and index * samples + s."""
    seen: set[int] = set(range(MOST_SAMPLES))  # indexes that were given by counting up from 0
    for samples in (1, 3, MOST_SAMPLES, 7, 8, MOST_SAMPLES, 1, 499):
        claim = store.claim(1, "dev", samples)
        numbers = {claim.index * samples + sample for sample in range(samples)}
        assert not seen & numbers
        seen |= numbers
    for wrong in (0, MOST_SAMPLES + 1):
        with pytest.raises(ConfigError, match="samples per task"):
            store.claim(1, "dev", wrong)


def test_names():
    assert evaluation_name(40, "dev", 1) == "v000040-dev-01"
    assert evaluation_name(None, "hidden", 12) == "model-hidden-12"


class TestReferences:
    @pytest.fixture
    def runs(self, tmp_path):
        for run in ("lookup-1a", "lookup-2b", "empty-3c"):
            RunRoot.create(str(tmp_path), run, "")
        store = EvaluationStore(str(tmp_path / "lookup-1a"))
        stored(store, "v000003-dev-01", version=3, run="lookup-1a")
        stored(store, "v000005-dev-02", version=5, run="lookup-1a", created_at_s=9.0)
        return tmp_path

    def test_a_run_is_its_newest(self, runs):
        assert find_evaluation(str(runs), "lookup-1").name == "v000005-dev-02"
        assert find_evaluation("elsewhere", str(runs / "lookup-1a")).name == "v000005-dev-02"

    def test_a_version_or_a_name_chooses(self, runs):
        for reference in ("lookup-1@3", "lookup-1@v3", "lookup-1a@v000003", "lookup-1@v000003-dev-01"):
            assert find_evaluation(str(runs), reference).name == "v000003-dev-01"

    def test_a_file_is_itself(self, runs):
        file = runs / "lookup-1a" / "evaluations" / "v000003-dev-01.json"
        assert find_evaluation("elsewhere", str(file)).name == "v000003-dev-01"

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("lookup", "fits 2 runs"),
            ("nothing", "no run 'nothing'"),
            ("lookup-1@9", "no evaluation of version 9"),
            ("lookup-1@v000003-dev-02", "v000003-dev-01"),
            ("empty", "has no evaluation"),
            ("lookup-1@²", "no evaluation '²'"),
            ("lookup-1@٣", "no evaluation '٣'"),
            ("lookup-2@best", "has no best.json"),
            ("none.json", "no file none.json"),
        ],
    )
    def test_what_is_not_there_is_named(self, runs, reference, message):
        with pytest.raises(NotFound, match=message):
            find_evaluation(str(runs), reference)

    def test_best_is_the_newest_of_the_best_version(self, runs):
        RunRoot(str(runs / "lookup-1a")).write_best({"version": 3})
        assert find_evaluation(str(runs), "lookup-1@best").name == "v000003-dev-01"

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"[1]", "not a stored evaluation: Expected `object`"),
            (b'{"a": 1}', "it has no schema_version"),
            (b'{"schema_version": 1}', "missing required field `name`"),
            (b"\xff", "JSON is malformed"),
            (b"", "truncated"),
            (b'{"a": ' + b"[" * 100_000, "not a stored evaluation"),
        ],
    )
    def test_a_file_that_is_no_evaluation_is_wrong_usage(self, tmp_path, data, message):
        (tmp_path / "some.json").write_bytes(data)
        with pytest.raises(ConfigError, match=rf"some\.json.*{message}"):
            find_evaluation("runs", str(tmp_path / "some.json"))

    def test_a_folder_is_no_evaluation(self, tmp_path):
        (tmp_path / "some.json").mkdir()
        with pytest.raises(ConfigError, match=r"some\.json cannot be read"):
            find_evaluation("runs", str(tmp_path / "some.json"))

    def test_a_foreign_file_among_them_is_named(self, runs):
        (runs / "lookup-1a" / "evaluations" / "notes.json").write_text("[1]")
        with pytest.raises(SchemaError, match=r"notes\.json is not a stored evaluation"):
            find_evaluation(str(runs), "lookup-1")

    def test_what_is_no_evaluation_is_refused(self, runs):
        file = Path(runs) / "lookup-1a" / "evaluations" / "v000003-dev-01.json"
        data = json.loads(file.read_text())
        file.write_text(json.dumps({**data, "schema_version": 9}))
        with pytest.raises(SchemaError, match=r"schema '9'; this build reads 1"):
            find_evaluation(str(runs), "lookup-1@3")
        file.write_text("[1]")
        with pytest.raises(SchemaError, match="not a stored evaluation"):
            find_evaluation(str(runs), "lookup-1@v000003-dev-01")
