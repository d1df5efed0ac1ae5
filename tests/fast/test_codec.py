import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.platform.errors import SchemaError
from headrace.platform.records import (
    SCHEMA_VERSION,
    AttemptId,
    Cost,
    FaultOwner,
    FinishReason,
    HashPair,
    InjectedFault,
    Purpose,
    Role,
    SamplingParams,
    Status,
    StopReason,
    TokenColumn,
    ToolCallRecord,
    Turn,
    VersionRef,
    VersionSpan,
    f32,
)
from headrace.platform.records.arrays import enc_hook
from headrace.platform.records.codec import RecordCodec, episode_codec
from headrace.platform.testing.episodes import make_episode

text = st.text(st.characters(codec="utf-8"), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(text, plain, max_size=3)


@st.composite
def turns(draw):
    length = draw(st.integers(0, 6))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    return Turn(
        role=draw(st.sampled_from(Role)),
        token_ids=np.array(ids, dtype=np.int32),
        action_mask=np.array(mask, dtype=np.uint8),
        behaviour_logprobs=np.array(logprobs, dtype=np.float32),
        content=draw(text),
        version_spans=tuple(VersionSpan(VersionRef("p", i, draw(st.integers(0, 9))), i, i + 1) for i in range(length)),
        sampling=draw(st.none() | st.builds(SamplingParams, temperature=st.floats(0.1, 2))),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        tool_calls=tuple(
            ToolCallRecord(index=n, call_id="c", name=draw(text), arguments=draw(objects), result_span=(0, n))
            for n in range(draw(st.integers(0, 2)))
        ),
        state_hash=HashPair(draw(text), draw(text)),
        token_columns=draw(st.just({}) | st.just({"entropy": TokenColumn(f32(logprobs), "action", "engine")})),
        metadata=draw(objects),
    )


@st.composite
def episodes(draw):
    return make_episode(
        tuple(draw(st.lists(turns(), max_size=4))),
        attempt_id=AttemptId(draw(text), draw(st.integers(0, 2**40)), 1, 2, draw(st.sampled_from(Purpose))),
        status=draw(st.sampled_from(Status)),
        fault_owner=draw(st.sampled_from(FaultOwner)),
        stop_reason=draw(st.sampled_from(StopReason)),
        branch_step=draw(st.none() | st.integers(0, 9)),
        injected_faults=(InjectedFault(1, "kill", draw(objects)),),
        cost=Cost(1, 2, 3, draw(st.floats(0, 1e6))),
        metadata=draw(objects),
    )


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(episodes())
def test_every_episode_survives_the_wire(episode):
    data = episode_codec.encode(episode)
    again = episode_codec.decode(data)
    assert episode_codec.encode(again) == data
    assert len(again.turns) == len(episode.turns)
    for turn, twin in zip(episode.turns, again.turns, strict=True):
        for name in ("token_ids", "action_mask", "behaviour_logprobs"):
            left, right = getattr(turn, name), getattr(twin, name)
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)
        assert (turn.role, turn.content, turn.version_spans) == (twin.role, twin.content, twin.version_spans)
        assert (turn.tool_calls, turn.metadata, turn.sampling) == (twin.tool_calls, twin.metadata, twin.sampling)
    for name in ("attempt_id", "task", "views", "status", "metadata", "cost", "injected_faults", "branch_step"):
        assert getattr(again, name) == getattr(episode, name)


def test_arrays_are_read_only_views():
    again = episode_codec.decode(episode_codec.encode(make_episode()))
    with pytest.raises(ValueError, match="read-only"):
        again.turns[0].token_ids[0] = 9


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_episode_are_refused(data):
    with pytest.raises(SchemaError):
        episode_codec.decode(data)


@settings(deadline=None)
@given(st.integers(0, 400))
def test_a_torn_episode_is_refused(cut):
    data = episode_codec.encode(make_episode())
    with pytest.raises(SchemaError):
        episode_codec.decode(data[: min(cut, len(data) - 1)])


def with_schema(version):
    plain = msgspec.msgpack.decode(episode_codec.encode(make_episode()))
    return msgspec.msgpack.encode({**plain, "schema_version": version})


def test_a_newer_or_too_old_schema_is_refused_by_name():
    for version in (SCHEMA_VERSION + 1, SCHEMA_VERSION - 1):
        with pytest.raises(SchemaError, match=f"Episode has schema {version}; this build reads {SCHEMA_VERSION}"):
            episode_codec.decode(with_schema(version))


class NoteV2(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 2
    title: str
    values: np.ndarray


@pytest.fixture
def notes():
    def upgrade(old):
        return {**{name: value for name, value in old.items() if name != "name"}, "title": old["name"]}

    return RecordCodec(NoteV2, 2, {1: lambda old: {**upgrade(old), "schema_version": 2}})


def packed(**fields):
    return msgspec.msgpack.encode(fields, enc_hook=enc_hook)


def test_the_schema_before_is_upgraded(notes):
    values = f32([1, 2])
    note = notes.decode(packed(schema_version=1, name="a", values=values))
    assert (note.schema_version, note.title, note.values.tolist()) == (2, "a", [1, 2])
    assert notes.decode(notes.encode(note)).title == "a"
    no_version = notes.decode(packed(name="b", values=values))  # schema 1 did not write its number
    assert no_version.title == "b"


def test_schemas_out_of_reach_are_refused(notes):
    for version in (0, 3):
        with pytest.raises(SchemaError, match=rf"NoteV2 has schema {version}; this build reads 2 and \[1\]"):
            notes.decode(packed(schema_version=version, title="a", values=f32([1])))


def test_an_upgrade_that_does_not_fit_is_refused(notes):
    with pytest.raises(SchemaError, match="not a NoteV2"):
        notes.decode(packed(schema_version=1, name=7, values=f32([1])))
    with pytest.raises(SchemaError, match="not a NoteV2"):
        notes.decode(packed(schema_version=2, title="a", values=msgspec.msgpack.Ext(9, b"")))


def test_a_message_whose_schema_does_not_come_first_is_read_all_the_same(notes):
    note = notes.decode(packed(title="a", values=f32([1]), schema_version=2))
    assert (note.schema_version, note.title) == (2, "a")
    old = notes.decode(packed(name="b", values=f32([1]), schema_version=1))
    assert (old.schema_version, old.title) == (2, "b")


def test_messages_of_few_and_of_many_fields_open_alike(notes):
    many = make_episode(worker_id="w", sandbox_id="s", audit_head="a", duration_s=1.0, fault="f")
    for codec, record in ((episode_codec, many), (notes, NoteV2(title="a", values=f32([1])))):
        data = codec.encode(record)
        assert data[0] == (0xDE if record is many else 0x83)  # a map of up to 15 fields, and of more
        assert codec.decode(data).schema_version == record.schema_version
        assert codec.decode(memoryview(data)).schema_version == record.schema_version


def test_an_array_with_gaps_travels_as_its_values(notes):
    every_other = np.arange(10, dtype=np.float32)[::2]
    assert notes.decode(notes.encode(NoteV2(title="a", values=every_other))).values.tolist() == [0, 2, 4, 6, 8]


def test_a_number_of_numpy_is_no_array():
    with pytest.raises(NotImplementedError, match="cannot encode float32"):
        episode_codec.encode(make_episode(metadata={"score": np.float32(1)}))


def test_other_arrays_are_not_encoded():
    turn = msgspec.structs.replace(make_episode().turns[0], token_ids=np.zeros(3))
    with pytest.raises(NotImplementedError, match="cannot encode ndarray"):
        episode_codec.encode(make_episode((turn,)))
