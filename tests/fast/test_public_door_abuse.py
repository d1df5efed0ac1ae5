"""The public door and clients that are wrong, gone, or up to no good."""

import asyncio
import gc
import json
import weakref

import httpx2
import pytest
from episode_kit import make_plan
from harness_kit import (
    TASK,
    TOOL,
    Engine,
    Scorer,
    call,
    chat,
    checked,
    client_of,
    make_door,
    numbered,
    opened,
    playing,
    say,
    user,
)

from headrace.actors.harness.environment import HarnessArgs, HarnessEnvironment
from headrace.actors.harness.play import Doorway, play_harness
from headrace.deploy.serving_door import PublicDoor
from headrace.platform.records import Budgets, Status, StopReason
from headrace.platform.testing.fakes.renderer import VOCABULARY
from headrace.serving.openai.app import build_app

CHAT = "/v1/chat/completions"
HALF = r"\ud800"
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
TOOLS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]'


async def post(path, content, door=None):
    async with client_of(door or make_door(Engine(numbered("x")))) as client:
        return await client.post(path, content=content)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"messages": [{{"role": "user", "content": "{HALF}"}}]}}',
        f"{{{MESSAGES}, {TOOLS % json.dumps('x').replace('x', HALF)}}}",
        f'{{{MESSAGES}, "stop": "{HALF}"}}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
        r'"{\"a\": \"\\ud800\"}"}}]}, {"role": "user", "content": "x"}]}',
    ],
)
async def test_half_a_character_is_replaced(body):  # case X10
    assert (await post(CHAT, body)).status_code == 200
    async with playing(Engine(numbered("done")), Scorer()) as (client, episode, _):
        url = await opened(client)
        assert (await client.post(f"{url}{CHAT}", content=body)).status_code == 200
        info = f'{{"info": {{"{HALF}": "{HALF}"}}}}'
        assert (await client.post(f"{url}/finish", content=info)).status_code == 200
        played = checked(await episode)
    assert played.episode.metadata["harness"]["info"] == {"?": "?"}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, f"{{{MESSAGES}, {TOOLS % 'NaN'}}}", "NaN is no number"),
        (CHAT, f"{{{MESSAGES}, {TOOLS % '1e999'}}}", "1e999 is no number"),
        (CHAT, f"{{{MESSAGES}, {TOOLS % ('[' * 300 + ']' * 300)}}}", "levels deep"),
        (CHAT, "[" * 100_000, "nested too deeply"),
        (CHAT, f'{{{MESSAGES}, "top_k": {10**30}}}', "top_k"),
        (CHAT, f'{{{MESSAGES}, "functions": [{{"name": "f"}}]}}', "offer tools"),
        ("/v1/completions", f'{{"prompt": [{VOCABULARY}]}}', f"they go up to {VOCABULARY - 1}"),
        ("/v1/completions", f'{{"prompt": [{10**12}]}}', "no token id"),
        ("/v1/completions", '{"prompt": "x", "logprobs": 5}', "logprobs"),
    ],
)
async def test_what_no_store_or_engine_takes_is_refused(path, body, told):
    response = await post(path, body)
    assert response.status_code == 400, response.text
    assert told in response.json()["error"]["message"]


async def test_ids_that_the_model_does_not_have_harm_no_episode():
    async with playing(Engine(numbered("done")), Scorer()) as (client, episode, _):
        url = await opened(client)
        for _ in range(5):
            response = await client.post(f"{url}/v1/completions", json={"prompt": [VOCABULARY]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        await chat(client, url, [user("go")])
        await client.post(f"{url}/finish")
        played = checked(await episode)
    assert played.episode.status is Status.OK
    assert {turn.agent_id for turn in played.episode.turns} == {""}  # what was refused has made no agent


async def test_a_long_body_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("headrace.serving.openai.bodies._MOST_BODY", 1000)
    sent = []

    async def endless():
        while True:
            sent.append(1)
            yield b"x" * 100

    response = await post(CHAT, endless())
    assert (response.status_code, "1000 bytes" in response.text) == (400, True)
    assert len(sent) == 11


@pytest.mark.parametrize("host", ["door/health?", "door/health#", "door/health"])
async def test_a_host_header_opens_no_door(host):
    public = PublicDoor(make_door(Engine(numbered("x"))), host="127.0.0.1", port=0, token="t")
    await public.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", public.port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
    finally:
        await public.close()
    assert status.split()[1] in (b"400", b"401")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1", "Origin": "http://localhost:3000"}, 200),
        ({"Host": "example.org"}, 403),
        ({"Host": "127.0.0.1.example.org"}, 403),
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_a_door_without_a_token_is_closed_to_web_pages(headers, status):
    public = PublicDoor(make_door(Engine(numbered("x"))), host="127.0.0.1", port=0)
    await public.start()
    try:
        async with httpx2.AsyncClient(base_url=public.url, headers=headers) as client:
            response = await client.post(CHAT, json={"messages": [user("hi")]})
            assert response.status_code == status, response.text
            assert (await client.get("/health")).status_code == 200
    finally:
        await public.close()


async def test_an_episode_is_named_by_the_path_alone():
    async with playing(Engine(numbered("one")), Scorer()) as (client, _, _):
        name = (await opened(client)).rpartition("/")[2]
        await client.post(f"{CHAT}?episode={name}", json={"messages": [user("go")]})
        assert (await client.post(f"/episodes/{name}/finish")).json()["turns"] == 0


# --- clients that leave -----------------------------------------------------------------------------------------------


class Watched(Engine):
    """Says when a generation was cancelled."""

    def __init__(self):
        super().__init__(numbered("x"))
        self.gate.clear()
        self.cancelled = asyncio.Event()

    async def generate(self, request):
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("is_stream", [False, True])
async def test_nobody_s_answer_is_not_sampled_for_nobody(is_stream, monkeypatch):
    monkeypatch.setattr("headrace.serving.openai.app._FIRST_S", 0.05)
    engine = Watched()
    public = PublicDoor(make_door(engine), host="127.0.0.1", port=0)
    await public.start()
    try:
        async with httpx2.AsyncClient(base_url=public.url) as client:
            body = {"messages": [user("hi")], "stream": is_stream}
            asking = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.wait_for(engine.began.wait(), 10)
            asking.cancel()
            await asyncio.wait_for(engine.cancelled.wait(), 10)
    finally:
        await public.close()
    assert len(engine.released) == 1


async def test_an_episode_s_answer_outlives_its_client():  # P24
    engine = Watched()
    door, args = make_door(engine), HarnessArgs()
    doorway = Doorway(door=door, args=args)
    episode = asyncio.create_task(play_harness(make_plan(TASK), HarnessEnvironment(args), engine, doorway))
    public = PublicDoor(door, host="127.0.0.1", port=0)
    await public.start()
    try:
        async with httpx2.AsyncClient(base_url=public.url, timeout=20) as client:
            url = (await opened(client)).removeprefix(public.url)
            asking = asyncio.create_task(chat(client, url, [user("go")]))
            await asyncio.wait_for(engine.began.wait(), 10)
            asking.cancel()
            async with httpx2.AsyncClient(base_url=public.url, timeout=20) as other:
                again = asyncio.create_task(chat(other, url, [user("go")]))
                engine.gate.set()
                assert (await again)["content"] == "x"
                assert (await other.post(f"{url}/finish")).json()["turns"] == 1
        await episode
    finally:
        await public.close()
    assert (len(engine.requests), engine.cancelled.is_set()) == (1, False)


async def test_an_episode_is_not_given_to_nobody():
    async with playing(Engine(numbered("x"))) as (_, episode, door):
        while not door.state().waiting_episodes:  # noqa: ASYNC110 - until it is on offer
            await asyncio.sleep(0)
        left = [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]

        async def receive():
            return left.pop(0) if len(left) > 1 else left[0]

        async def send(message):
            told.append(message)

        told: list = []
        scope = {"type": "http", "method": "POST", "path": "/episodes", "raw_path": b"/episodes", "query_string": b"",
                 "headers": [(b"host", b"door")], "server": ("door", 80), "scheme": "http"}  # fmt: skip
        await build_app(door)(scope, receive, send)
        assert told[0]["status"] == 499
        played = checked(await asyncio.wait_for(episode, 10))
    assert "had left" in played.episode.fault


# --- episodes at their budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budgets", "second", "reason"),
    [
        (Budgets(1, 500, 60.0), "other", StopReason.MAX_TURNS),
        (Budgets(9, 30, 60.0), "x" * 40, StopReason.MAX_TOKENS),
    ],
)
async def test_a_turn_under_way_is_part_of_the_episode_whose_budget_is_spent(budgets, second, reason):  # P27
    engine = Engine(numbered("done"))
    async with playing(engine, Scorer(), budgets=budgets) as (client, episode, _):
        url = await opened(client)
        engine.gate.clear()
        first = asyncio.create_task(chat(client, url, [user("go")]))
        await engine.began.wait()
        over = asyncio.create_task(client.post(f"{url}{CHAT}", json={"messages": [user(second)]}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not over.done()
        engine.gate.set()
        assert (await first)["content"] == "done"
        assert (await over).status_code == 410
        played = checked(await episode)
    assert (played.episode.status, played.episode.stop_reason) == (Status.BUDGET_EXHAUSTED, reason)
    assert played.score == 1.0


async def test_the_door_forgets_what_was_said_in_episodes_that_are_over():
    door, args = make_door(Engine(numbered("done"))), HarnessArgs()
    doorway = Doorway(door=door, args=args)
    playing_it = asyncio.create_task(play_harness(make_plan(TASK), HarnessEnvironment(args), Watched(), doorway))
    name = (await door.open(5.0)).episode
    said = weakref.ref(door._open[name].episode)
    summary = await door.finish(name, {})
    await playing_it
    del playing_it
    gc.collect()
    assert said() is None
    assert await door.finish(name, {}) == summary


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_no_call_is_told_from_behind_a_stop_text():
    engine = Engine(lambda prompt: say("done") if "<|tool|>" in prompt else [*b"so STOP: ", *call(2)])
    body = {"messages": [user("hi")], "tools": [TOOL], "stop": "STOP"}
    choice = (await post(CHAT, json.dumps(body), make_door(engine))).json()["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "so "}, "stop")


async def test_a_stream_has_no_line_ends_but_its_own():
    text = "a\u2028b\u0085c"
    response = await post(CHAT, f'{{{MESSAGES}, "stream": true}}', make_door(Engine(numbered(text))))
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events) == text


async def test_parts_of_a_character_have_no_bytes():
    response = await post(CHAT, f'{{{MESSAGES}, "logprobs": true}}', make_door(Engine(numbered("aé"))))
    tokens = response.json()["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in tokens[:3]] == [[97], None, None]
