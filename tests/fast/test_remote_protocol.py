"""The words of hosts and clients: nothing is lost on the way, and an error comes out as what went in."""

import pickle

import msgspec
import pytest

from headrace import Message, Role, Status, StepResult, Task
from headrace.actors.remote.protocol import (
    Code,
    ResetData,
    StepData,
    decode,
    encode,
    error_of,
    fault_of,
    news_of,
    with_news,
)
from headrace.platform.errors import (
    DeadlineExceeded,
    EngineError,
    EnvironmentFault,
    HostAway,
    InfrastructureFault,
    SandboxDied,
)
from headrace.platform.hashing import hash_value
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Cost, RewardComponent, ToolCall
from headrace.platform.records.status import FaultOwner, RewardKind


def sent(kind, value):
    """`value` after the way through a frame."""
    said = decode(encode({"type": "x", "data": {"value": value}}))
    return msgspec.convert(said.data["value"], kind)


def test_a_whole_result_survives():  # case X16
    result = StepResult(
        messages=(Message(Role.TOOL, "é\n\x00", tool_call_id="c"),),
        rewards=(
            RewardComponent(RewardKind.OUTCOME, 0.1, evidence="e"),
            RewardComponent(RewardKind.SAFETY, valid=False),
        ),
        truncated=True,
        status=Status.BUDGET_EXHAUSTED,
        cost=Cost(tool_calls=2, tool_s=0.25),
        state_hash=hash_value({"a": 1}),
        metadata={"n": 2**60, "f": 1e-300, "deep": [{"x": None}], "é": True},
    )
    assert sent(StepResult, result) == result
    task = Task("t", "e", data={"rows": [1, "two"]}, version="7", split="dev", seed=2**62)
    assert sent(ResetData, ResetData(task=task, seed=2**62)) == ResetData(task=task, seed=2**62)


@pytest.mark.parametrize("arguments", [{"key": "\ud800"}, {"n": 10**40}, {"é": [1.5, None, {}]}])
def test_whatever_a_model_writes_into_arguments_survives(arguments):
    data = StepData(message=Message(Role.ASSISTANT, tool_calls=(ToolCall("get", arguments),)), key="k")
    assert sent(StepData, data).message.tool_calls[0].arguments == arguments


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"data":{}}', b'{"type":1}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(ValueError, match=r"."):
        decode(raw)


@pytest.mark.parametrize(
    ("error", "cls", "owner", "transient"),
    [
        (SandboxDied("s"), SandboxDied, FaultOwner.INFRASTRUCTURE, True),
        (HostAway("h"), HostAway, FaultOwner.INFRASTRUCTURE, True),
        (InfrastructureFault("i"), InfrastructureFault, FaultOwner.INFRASTRUCTURE, True),
        (DeadlineExceeded("d"), DeadlineExceeded, FaultOwner.ENVIRONMENT, True),
        (TimeoutError("t"), DeadlineExceeded, FaultOwner.ENVIRONMENT, True),
        (EnvironmentFault("e"), EnvironmentFault, FaultOwner.ENVIRONMENT, True),
        (EnvironmentFault("b", transient=False), EnvironmentFault, FaultOwner.ENVIRONMENT, False),
        (ZeroDivisionError("z"), EnvironmentFault, FaultOwner.ENVIRONMENT, False),
        (EngineError("g"), EnvironmentFault, FaultOwner.ENVIRONMENT, False),
    ],
)
def test_an_error_comes_out_as_what_went_in(error, cls, owner, transient):
    fault = sent(type(fault_of(error)), fault_of(error))
    assert (fault.owner, fault.transient) == (owner, transient)
    again = error_of(fault)
    assert type(again) is cls
    assert str(error) in str(again)
    assert getattr(again, "transient", True) is transient
    assert str(pickle.loads(pickle.dumps(again))) == str(again)


def test_the_text_names_the_line_and_is_bounded():
    def breaks():
        raise KeyError("wall")

    with pytest.raises(KeyError) as found:
        breaks()
    assert "test_remote_protocol.py:" in fault_of(found.value).text
    assert "in breaks: KeyError: 'wall'" in fault_of(found.value).text
    assert len(fault_of(ValueError("x" * 10**6)).text) == 4000
    assert "?" in fault_of(ValueError("\ud800")).text


def test_provenance_is_told_once_and_the_cassette_by_its_new_steps():
    first = Provenance(sandbox_id="b", external={"0": ["a"]})
    told = with_news(Provenance(), news_of(first, Provenance()))
    assert told == first
    assert news_of(first, told) is None
    second = Provenance(sandbox_id="b", external={"0": ["a"], "1": ["b", "c"]})
    news = news_of(second, first)
    assert news.external == {"1": ["b", "c"]}
    assert with_news(told, news) == second


def test_codes_say_whether_anything_has_begun():
    assert {code for code in Code if code.refuses} == {Code.FULL, Code.DRAINING, Code.CAPACITY_REACHED}
    assert {code for code in Code if code.ends} == {Code.CANCELLED, Code.IDLE, Code.SESSION_ERROR}
