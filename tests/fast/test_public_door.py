"""The HTTP surface of the public door: OpenAI's shapes, errors by status and field, streams, tokens."""

import asyncio
import json

import pytest
from harness_kit import TOOL, Engine, call, client_of, make_door, numbered, playing, say, user
from openai import AsyncOpenAI, NotFoundError

from headrace.platform.contracts import OpenedEpisode
from headrace.platform.errors import EngineDead
from headrace.platform.records import Message, Role, UpdateMode
from headrace.platform.testing.fakes.doors import ScriptedConversations
from headrace.platform.testing.fakes.engine import SCRIPTED_LOGPROB
from headrace.platform.testing.fakes.renderer import END


def door_of(*texts, **options):
    return make_door(Engine(numbered(*texts), versions=(3, 4), policy_id="policy"), **options)


async def post(door, path, body, **how):
    async with client_of(door, **how) as client:
        return await client.post(path, json=body)


async def asked(door, **body):
    return await post(door, "/v1/chat/completions", {"messages": [user("hi")], **body})


async def test_a_chat_answer_has_openais_shape():
    answer = (await asked(door_of("hello"), logprobs=True, top_logprobs=0, return_token_ids=True)).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy@v4")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert choice["token_ids"] == [*b"hello", END]
    assert len(answer["prompt_token_ids"]) == 5
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [SCRIPTED_LOGPROB] * 6
    assert choice["logprobs"]["content"][0]["token"] == "h"


async def test_ids_and_logprobs_come_on_request_only():
    answer = (await asked(door_of("hello"))).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_calls_have_ids_and_json_arguments():
    door = make_door(Engine(lambda prompt: call(2)))
    choice = (await asked(door, tools=[TOOL], tool_choice="auto")).json()["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    assert (made["type"], made["function"]["name"]) == ("function", "add")
    assert json.loads(made["function"]["arguments"]) == {"amount": 2}
    assert (len(made["id"]), made["id"].isalnum()) == (9, True)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


async def test_no_tools_are_shown_where_none_may_be_called():
    engine = Engine(lambda prompt: say("tools" if "<|tools|>" in prompt else "none"))
    for choice, text in (("none", "none"), ("auto", "tools")):
        answer = await asked(make_door(engine), tools=[TOOL], tool_choice=choice)
        assert answer.json()["choices"][0]["message"]["content"] == text


async def test_stop_texts_cut_the_answer():
    choice = (await asked(door_of("hello world"), stop=[" w", "ld"])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hello", "stop")
    choice = (await asked(door_of("hello"), max_completion_tokens=2)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("he", "length")


async def test_sampling_is_the_client_s():
    engine = Engine(numbered("x"))
    await asked(make_door(engine), temperature=0.5, top_p=0.9, seed=11, max_tokens=7)
    await asked(make_door(engine), temperature=0)
    first, greedy = engine.requests
    wanted = first.sampling
    assert (wanted.temperature, wanted.top_p, wanted.max_new_tokens, first.seed) == (0.5, 0.9, 7, 11)
    assert wanted.stop_token_ids == (END,)
    assert greedy.sampling.top_k == 1
    assert [request.session for request in engine.requests] == engine.released


@pytest.mark.parametrize("prompt", ["go on", list(b"go on"), ["go on"], [list(b"go on")]])
async def test_texts_and_token_ids_are_completed(prompt):
    engine = Engine(numbered("done"))
    answer = (
        await post(make_door(engine), "/v1/completions", {"prompt": prompt, "logprobs": 0, "return_token_ids": True})
    ).json()
    (choice,) = answer["choices"]
    assert engine.requests[0].token_ids.tolist() == list(b"go on")  # ids go in as they are
    assert (choice["text"], choice["prompt_token_ids"]) == ("done", list(b"go on"))
    assert choice["logprobs"]["tokens"][:2] == ["d", "o"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": [user("x" * 3000)]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
async def test_a_wrong_request_names_the_field(change, field):
    response = await asked(door_of("x"), **change)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(field)
    assert error["message"]


async def test_what_is_no_json_is_refused():
    async with client_of(door_of("x")) as client:
        for content in (b"{", b"[1]", b"\xff"):
            response = await client.post("/v1/chat/completions", content=content)
            assert response.status_code == 400, content


async def test_models_and_versions():
    async with client_of(door_of("x")) as client:
        names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        assert names == ["policy", "policy@v4", "policy@v3"]
        versions = (await client.get("/versions")).json()
        assert versions == {"model": "policy", "versions": [3, 4], "newest": 4, "draining": False}
    for name, version in (("policy@v3", "policy@v3"), ("v3", "policy@v3"), ("", "policy@v4")):
        assert (await asked(door_of("x"), model=name)).json()["model"] == version
    engine = Engine(numbered("x"), versions=(3, 4), policy_id="policy")
    for name in ("policy", "policy@v3"):
        await asked(make_door(engine), model=name)
    modes = [(request.version, request.update_mode) for request in engine.requests]
    assert modes == [(4, UpdateMode.TURN), (3, UpdateMode.STICKY)]  # P22
    for name in ("policy@v9", "gpt-x"):
        response = await asked(door_of("x"), model=name)
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_health_says_whether_a_version_can_be_sampled():
    for versions, draining, status in (((0,), False, 200), ((), False, 503), ((0,), True, 503)):
        door = make_door(Engine(numbered("x"), versions=versions))
        door.is_draining = draining
        async with client_of(door, token="t") as client:
            assert (await client.get("/health")).status_code == status
    assert (await asked(door)).status_code == 503


async def test_metrics_count_requests_and_tokens():
    async with client_of(door_of("hello")) as client:
        await client.post("/v1/chat/completions", json={"messages": [user("hi")]})
        await client.post("/v1/chat/completions", json={})
        page = (await client.get("/metrics")).text
    assert 'headrace_door_requests_total{route="/v1/chat/completions",status="200"} 1.0' in page
    assert 'headrace_door_requests_total{route="/v1/chat/completions",status="400"} 1.0' in page
    assert "headrace_door_sampled_tokens_total 6.0" in page
    assert "headrace_door_newest_version 4.0" in page
    assert 'headrace_door_request_seconds_count{route="/v1/chat/completions"} 2.0' in page


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": "Bearer yes"}, 200)],
)
async def test_a_token_is_asked_for(headers, status):
    async with client_of(door_of("x"), token="yes", **headers) as client:
        for method, path in (("GET", "/v1/models"), ("GET", "/versions"), ("GET", "/metrics")):
            response = await client.request(method, path)
            assert response.status_code == status, path
        assert (await client.post("/episodes")).status_code == (429 if status == 200 else 401)


async def test_unknown_pages_and_episodes():
    async with client_of(door_of("x")) as client:
        for method, path in (
            ("GET", "/v2"),
            ("POST", "/episodes/ep-1/v1/chat/completions"),
            ("POST", "/episodes/ep-1/finish"),
            ("DELETE", "/episodes/ep-1"),
        ):
            response = await client.request(method, path, json={"messages": [user("x")]} if "chat" in path else {})
            assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error"), path
        assert (await client.get("/v1/chat/completions")).status_code == 405
        response = await client.post("/episodes")
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_errors_of_the_engine_have_statuses():
    engine = Engine(numbered("x"))
    await engine.close()
    response = await asked(make_door(engine))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    engine = Engine(numbered("x"))
    engine.gate.clear()
    assert (await asked(make_door(engine, deadline_s=0.01))).status_code == 504


async def test_a_key_is_answered_once():  # P24
    engine = Engine(numbered("one", "two"))
    body, key = {"messages": [user("hi")]}, {"Idempotency-Key": "k"}
    async with client_of(make_door(engine)) as client:
        answers = [await client.post("/v1/chat/completions", json=body, headers=key) for _ in range(2)]
        assert {each.json()["choices"][0]["message"]["content"] for each in answers} == {"one"}
        other = await client.post("/v1/chat/completions", json={"messages": [user("ho")]}, headers=key)
        assert other.status_code == 409
    assert len(engine.requests) == 1


async def test_who_waits_for_an_episode_is_sent_away_when_the_door_closes():
    door = door_of("x")
    async with client_of(door) as client:
        waiting = asyncio.create_task(client.post("/episodes", json={"wait_s": 100}))
        while not door._offered._waiters:  # noqa: ASYNC110 - the door tells nobody who waits
            await asyncio.sleep(0)
        door.begin_drain()
        assert (await waiting).status_code == 503


async def test_nobody_is_told_of_a_bug():
    def broken(prompt):
        raise KeyError("a secret")

    response = await asked(make_door(Engine(broken)))
    assert response.status_code == 500
    assert "secret" not in response.text


# --- streams, with the client that people use -------------------------------------------------------------------------


def openai_of(client):
    return AsyncOpenAI(base_url="http://door/v1", api_key="none", http_client=client, max_retries=0)


async def test_a_stream_reads_as_the_whole_answer():
    engine = Engine(lambda prompt: [*b"so: ", *call(2)])
    async with client_of(make_door(engine)) as client, openai_of(client) as openai:
        stream = await openai.chat.completions.create(
            model="policy",
            messages=[user("hi")],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == "so: "
    (made,) = [each for choice in choices for each in choice.delta.tool_calls or ()]
    assert (made.index, made.function.name) == (0, "add")
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert len(chunks[0].prompt_token_ids) > 0
    assert [choice.token_ids for choice in choices if hasattr(choice, "token_ids")] == [[*b"so: ", *call(2)]]
    assert chunks[-1].usage.completion_tokens == len(call(2)) + 4


async def test_a_text_streams_too():
    async with client_of(door_of("hello")) as client, openai_of(client) as openai:
        stream = await openai.completions.create(model="policy", prompt="x", stream=True, max_tokens=20)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"


async def test_errors_of_a_stream_are_statuses_as_long_as_it_has_not_begun():
    async with client_of(door_of("hello")) as client, openai_of(client) as openai:
        with pytest.raises(NotFoundError, match="there is no model"):
            await openai.chat.completions.create(model="gpt-x", messages=[user("x")], stream=True)


async def test_late_errors_are_events(monkeypatch):
    monkeypatch.setattr("headrace.serving.openai.app._FIRST_S", 0.01)
    monkeypatch.setattr("headrace.serving.openai.app._KEEP_ALIVE_S", 0.01)

    class Late(Engine):
        async def generate(self, request):
            await asyncio.sleep(0.05)
            raise EngineDead("the replica is gone")

    response = await asked(make_door(Late(numbered("x"))), stream=True)
    assert response.status_code == 200
    assert response.text.startswith(": keep-alive\n\n")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[0])["error"]["message"] == "the replica is gone"
    assert events[-1] == "[DONE]"


async def test_the_fake_is_served_as_the_real_one_is():
    waiting = OpenedEpisode(
        episode="ep-1", messages=(Message(Role.USER, "go"),), metadata={}, deadline_s=9.0, max_turns=2, max_tokens=99
    )
    fake = ScriptedConversations(lambda asked: asked.messages[-1].content.upper(), [waiting])
    async with client_of(fake) as client:
        opened = (await client.post("/episodes")).json()
        assert (opened["id"], opened["deadline_s"]) == ("ep-1", 9.0)
        assert (await client.post("/episodes")).status_code == 429
        answer = await client.post(f"{opened['base_url']}/chat/completions", json={"messages": [user("go")]})
        assert answer.json()["choices"][0]["message"]["content"] == "GO"
        for _ in range(2):  # the same again gives the same answer
            done = await client.post("/episodes/ep-1/finish", json={"info": "it went well"})
            assert (done.status_code, done.json()["turns"]) == (200, 1)
        assert fake.info == {"ep-1": {"text": "it went well"}}
        late = await client.post("/episodes/ep-1/v1/chat/completions", json={"messages": [user("go")]})
        assert late.status_code == 410


async def test_an_episode_streams_and_a_lost_stream_is_not_lost():  # P24
    engine = Engine(numbered("one", "done"))
    async with playing(engine) as (client, _, _):
        opened = (await client.post("/episodes", json={"wait_s": 5})).json()
        assert opened["task"] == {
            "messages": [user("go")],
            "metadata": {"task_id": "t1", "seed": 7, "hint": "h"},
        }
        body = {"messages": [user("go")], "stream": True}
        for _ in range(2):
            text = (await client.post(f"{opened['base_url']}/chat/completions", json=body)).text
            assert '"content": "one"' in text
    assert len(engine.requests) == 1
