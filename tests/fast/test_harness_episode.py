"""Episodes that a harness plays: matching, segments, branches, retries, ends."""

import asyncio
import sys

import numpy as np
import pytest
from harness_kit import (
    TASK,
    TOOL,
    Engine,
    Scorer,
    call,
    chat,
    checked,
    numbered,
    opened,
    playing,
    say,
    system,
    user,
)

from headrace.actors.harness.environment import HarnessArgs
from headrace.actors.outcomes import EnvironmentCounts
from headrace.platform.errors import EngineDead, VersionUnavailable
from headrace.platform.records import Budgets, FaultOwner, Role, Status, StopReason, UpdateMode
from headrace.platform.testing.fakes.renderer import CharRenderer
from headrace.trainer.samples import build_samples


async def finish(client, url, **body):
    response = await client.post(f"{url}/finish", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def samples_of(played):
    return build_samples(played.episode, [1.0] * len(played.episode.views))


def text_of(sample):
    return CharRenderer().decode(sample.token_ids.tolist())


async def test_a_conversation_is_one_sample_of_sampled_ids():  # case T1
    scorer, engine = Scorer(), Engine(numbered(" well ", "done"))
    async with playing(engine, scorer) as (client, episode, _):
        url = await opened(client)
        first = await chat(client, url, [user("go")])
        # The harness trims what it was told; the recorded ids keep the blanks.
        told = {"role": "assistant", "content": first["content"].strip()}
        await chat(client, url, [user("go"), told, user("and?")])
        summary = await finish(client, url, info={"log": "fine"})
        played = checked(await episode)
    (sample,) = samples_of(played)
    assert text_of(sample) == "<|user|>go<|end|><|assistant|> well <|end|><|user|>and?<|end|><|assistant|>done<|end|>"
    assert sample.loss_mask.sum() == len(" well ") + 1 + len("done") + 1
    record = played.episode
    assert (record.status, record.stop_reason, played.score) == (Status.OK, StopReason.TERMINATED, 1.0)
    assert summary["turns"] == 2
    assert record.metadata["harness"]["tools"] == "external"
    assert scorer.seen[0].metadata["harness"]["info"] == {"log": "fine"}
    assert [request.version for request in engine.requests] == [0, 0]
    assert engine.released == [record.episode_id]  # P19


async def test_calls_and_parallel_results_are_bridged():  # case T4
    two = [*call(1)[:-1], *call(2)]
    engine = Engine(lambda prompt: say("done") if "<|tool|>" in prompt else two)
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        first = await chat(client, url, [user("go")], tools=[TOOL])
        ids = [each["id"] for each in first["tool_calls"]]
        assert len(set(ids)) == 2
        results = [{"role": "tool", "tool_call_id": each, "content": f"r{n}"} for n, each in enumerate(ids)]
        await chat(client, url, [user("go"), first, *results], tools=[TOOL])
        await finish(client, url)
        played = checked(await episode)
    (sample,) = samples_of(played)
    assert text_of(sample).endswith("<|tool|>r0<|end|><|tool|>r1<|end|><|assistant|>done<|end|>")
    record = played.episode.turns[1]
    assert [each.arguments for each in record.tool_calls] == [{"amount": 1}, {"amount": 2}]
    assert played.episode.metadata["harness"]["segments_opened"] == 0


async def test_an_edited_history_opens_a_segment():  # case T3
    engine = Engine(numbered("one", "two", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        summary = user("summary: one")
        second = await chat(client, url, [user("go"), summary])
        await chat(client, url, [user("go"), summary, {"role": "assistant", **second}, user("more")])
        assert (await finish(client, url))["segments_opened"] == 1
        played = checked(await episode)
    first, rest = samples_of(played)
    assert (first.segment, rest.segment) == (0, 1)
    assert text_of(first) == "<|user|>go<|end|><|assistant|>one<|end|>"
    assert "one<|end|><|assistant|>two" in text_of(rest)
    assert rest.loss_mask.sum() == len("two") + len("done") + 2


async def test_a_segment_that_failed_to_open_is_not_counted():  # case T3
    engine = Broken()
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        engine.errors.append(EngineDead("gone"))
        edited = [user("go"), user("again")]
        assert (await client.post(f"{url}/v1/chat/completions", json={"messages": edited})).status_code == 503
        await chat(client, url, edited)
        assert (await finish(client, url))["segments_opened"] == 1
        played = checked(await episode)
    assert [sample.segment for sample in samples_of(played)] == [0, 1]
    counts = EnvironmentCounts()
    counts.add(played)
    assert counts.segments_opened == 1


async def test_a_turn_that_was_cut_off_is_closed_by_the_platform():  # case T6
    engine = Engine(numbered("one two", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        cut = {"role": "assistant", **await chat(client, url, [user("go")], max_tokens=3)}
        assert cut["content"] == "one"
        await chat(client, url, [user("go"), cut, user("more")])
        await finish(client, url)
        played = checked(await episode)
    (sample,) = samples_of(played)
    assert "<|assistant|>one<|end|><|user|>more" in text_of(sample)
    assert sample.loss_mask.sum() == len("one") + len("done") + 1


async def test_a_scorer_that_raises_has_said_nothing():  # case E1
    class Broken(Scorer):
        async def score(self, task, episode):
            raise KeyError("gold")

    async with playing(Engine(numbered("done")), Broken()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        assert (await finish(client, url))["status"] == "OK"
        played = checked(await episode)
    assert played.score is None
    assert "gold" in played.cause


async def test_what_the_assistant_never_said_is_not_matched():
    engine = Engine(numbered("one", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        await chat(client, url, [user("go"), {"role": "assistant", "content": "two"}, user("more")])
        await finish(client, url)
        played = checked(await episode)
    assert [sample.segment for sample in samples_of(played)] == [0, 1]


async def test_two_agents_that_interleave_are_two_samples():  # case T18
    engine = Engine(lambda prompt: say("done") if "more" in prompt else say("a" if "<|system|>A" in prompt else "b"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        said = {}
        for text in ("go", "more"):
            for name in ("A", "B"):  # A1 B1 A2 B2
                said.setdefault(name, [system(name)]).append(user(text))
                answer = await chat(client, url, said[name])
                said[name].append({"role": "assistant", "content": answer["content"]})
        await finish(client, url)
        played = checked(await episode)
    a, b = samples_of(played)
    assert [text_of(a)[:11], text_of(b)[:11]] == ["<|system|>A", "<|system|>B"]
    assert (a.agent_id, b.agent_id) == ("", "1")
    assert [text_of(each).count("<|assistant|>") for each in (a, b)] == [2, 2]
    assert {request.session for request in engine.requests} == {
        played.episode.episode_id,
        f"{played.episode.episode_id}/1",
    }
    assert played.episode.metadata["harness"] | {"info": 0} == {
        "tools": "external", "agents": 2, "segments_opened": 0, "retries": 0, "ignored": [], "info": 0,
    }  # fmt: skip


async def test_branches_of_one_turn_are_samples_of_their_own():
    engine = Engine(numbered("one", "left", "right", "left again"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        one = {"role": "assistant", **await chat(client, url, [user("go")])}
        engine.gate.clear()
        turns = [asyncio.create_task(chat(client, url, [user("go"), one, user(text)])) for text in ("left?", "right?")]
        while len(engine.requests) < 3:
            engine.began.clear()
            await engine.began.wait()
        engine.gate.set()
        left, _ = await asyncio.gather(*turns)
        await chat(client, url, [user("go"), one, user("left?"), {"role": "assistant", **left}, user("more")])
        await finish(client, url)
        played = checked(await episode)
    main, branch = samples_of(played)
    assert text_of(main).count("<|assistant|>") == 3
    assert "right?<|end|><|assistant|>right" in text_of(branch)
    assert branch.loss_mask.sum() == len("right") + 1  # the shared turn is trained once
    total = sum(int(turn.action_mask.sum()) for turn in played.episode.turns)
    assert sum(int(each.loss_mask.sum()) for each in (main, branch)) == total


async def test_a_retry_attaches_to_the_running_generation():  # P24
    engine = Engine(numbered("one", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        engine.gate.clear()
        first = asyncio.create_task(chat(client, url, [user("go")]))
        await engine.began.wait()
        first.cancel()  # the client is gone; its turn is not
        again = asyncio.create_task(chat(client, url, [user("go")], headers={"x-stainless-retry-count": "1"}))
        engine.gate.set()
        assert (await again)["content"] == "one"
        assert (await chat(client, url, [user("go")]))["content"] == "one"  # nothing followed it yet
        assert len(engine.requests) == 1
        one = {"role": "assistant", "content": "one"}
        await chat(client, url, [user("go"), one, user("more")])
        late = await chat(client, url, [user("go")], headers={"x-stainless-retry-count": "2"})
        assert (late["content"], len(engine.requests)) == ("one", 2)
        await finish(client, url)
        played = checked(await episode)
    assert len(played.episode.views) == 2
    assert played.episode.metadata["harness"]["retries"] == 3


async def test_keys_say_what_is_the_same_request():
    engine = Engine(numbered("one", "two", "three"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        said = [(await chat(client, url, [user("go")], headers={"Idempotency-Key": key}))["content"] for key in "aabc"]
        assert said == ["one", "one", "two", "three"]
        body = {"messages": [user("other")]}
        response = await client.post(f"{url}/v1/chat/completions", json=body, headers={"Idempotency-Key": "a"})
        assert response.status_code == 409
        await finish(client, url)
        played = checked(await episode)
    assert [sample.agent_id for sample in samples_of(played)] == ["", "1", "2"]
    assert played.episode.metadata["harness"]["segments_opened"] == 0


async def test_the_recipe_samples_and_the_client_is_told_so():
    engine = Engine(numbered("abcdef", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        answer = await chat(
            client, url, [user("go")], temperature=0.1, top_p=0.5, seed=3, model="gpt-x", max_tokens=4, stop="c"
        )
        assert answer["content"] == "ab"
        await finish(client, url)
        played = checked(await episode)
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_new_tokens) == (1.0, 1.0, 4)
    assert played.episode.metadata["harness"]["ignored"] == ["seed", "temperature", "top_p"]
    assert played.episode.turns[1].token_ids.tolist() == list(b"abcd")


async def test_token_ids_go_on_from_token_ids():
    engine = Engine(numbered("one", "done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        prompt = list(b"go on: ")
        body = {"prompt": prompt, "max_tokens": 9, "return_token_ids": True}
        choice = (await client.post(f"{url}/v1/completions", json=body)).json()["choices"][0]
        assert choice["prompt_token_ids"] == prompt
        body["prompt"] = [*prompt, *choice["token_ids"], *b" more"]
        await client.post(f"{url}/v1/completions", json=body)
        await finish(client, url)
        played = checked(await episode)
    (sample,) = samples_of(played)
    assert text_of(sample) == "go on: one<|end|> moredone<|end|>"


@pytest.mark.parametrize("body", [{"reward": 1}, {"info": {"score": 1}}, {"rewards": []}])
async def test_a_harness_gives_no_reward(body):
    async with playing(Engine(numbered("done")), Scorer()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        response = await client.post(f"{url}/finish", json=body)
        assert response.status_code == 400
        assert "registered scorer" in response.json()["error"]["message"]
        assert not episode.done()


async def test_ends_without_a_word_are_faults():
    async with playing(Engine(numbered("done")), Scorer()) as (client, episode, _):
        url = await opened(client)
        assert (await finish(client, url))["status"] == "ENV_TRANSIENT"
        played = checked(await episode)
    assert (played.score, played.episode.fault_owner) == (None, FaultOwner.ENVIRONMENT)


async def test_an_abandoned_episode_has_no_reward():
    async with playing(Engine(numbered("done")), Scorer()) as (client, episode, _):
        url = await opened(client)
        await chat(client, url, [user("go")])
        assert (await client.request("DELETE", url, json={"reason": "the box broke"})).status_code == 204
        played = checked(await episode)
        assert (await client.post(f"{url}/v1/chat/completions", json={"messages": [user("go")]})).status_code == 410
    assert (played.score, played.episode.status) == (None, Status.ENV_TRANSIENT)
    assert "the box broke" in played.episode.fault


async def test_nobody_takes_it():
    async with playing(Engine(numbered("done")), args=HarnessArgs(take_s=0.01)) as (_, episode, door):
        played = checked(await episode)
        assert door.state().waiting_episodes == 0
    assert played.episode.status is Status.ENV_TRANSIENT
    assert "a harness to take the episode" in played.episode.fault


@pytest.mark.parametrize(
    ("budgets", "reason"),
    [
        (Budgets(1, 500, 60.0), StopReason.MAX_TURNS),
        (Budgets(9, 25, 60.0), StopReason.MAX_TOKENS),
        (Budgets(9, 500, 0.2), StopReason.MAX_SECONDS),
    ],
)
async def test_budgets_end_it_and_it_is_graded(budgets, reason):  # P27
    async with playing(Engine(numbered("done")), Scorer(), budgets=budgets) as (client, episode, _):
        url = await opened(client)
        one = {"role": "assistant", **await chat(client, url, [user("go")])}
        if reason is StopReason.MAX_SECONDS:
            await episode
        body = {"messages": [user("go"), one, user("a long answer that has no room")]}
        response = await client.post(f"{url}/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (410, "episode_over")
        played = checked(await episode)
    assert (played.episode.status, played.episode.stop_reason) == (Status.BUDGET_EXHAUSTED, reason)
    assert played.score == 1.0


async def test_a_prompt_without_room_is_the_recipe_s_fault():
    async with playing(Engine(numbered("done")), budgets=Budgets(9, 5, 60.0)) as (client, episode, _):
        url = await opened(client)
        await client.post(f"{url}/v1/chat/completions", json={"messages": [user("too long")]})
        played = checked(await episode)
    assert (played.episode.status, played.score) == (Status.ENV_BUG, None)


class Broken(Engine):
    """Raises what it is given, one after the other, before it answers."""

    def __init__(self, *errors, **options):
        super().__init__(numbered("done"), **options)
        self.errors = list(errors)

    async def generate(self, request):
        if self.errors:
            raise self.errors.pop(0)
        return await super().generate(request)


async def test_a_dead_replica_is_asked_again():  # P24
    async with playing(Broken(EngineDead("gone")), Scorer()) as (client, episode, _):
        url = await opened(client)
        body = {"messages": [user("go")]}
        response = await client.post(f"{url}/v1/chat/completions", json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert (await chat(client, url, [user("go")]))["content"] == "done"
        await finish(client, url)
        played = checked(await episode)
    assert len(played.episode.views) == 1
    assert played.episode.metadata["harness"]["segments_opened"] == 0


@pytest.mark.parametrize("errors", [[VersionUnavailable("no")], [EngineDead("gone")] * 3])
async def test_an_engine_that_stays_away_ends_it(errors):
    count = len(errors)
    async with playing(Broken(*errors), Scorer()) as (client, episode, _):
        url = await opened(client)
        for _ in range(count):
            await client.post(f"{url}/v1/chat/completions", json={"messages": [user("go")]})
        played = checked(await episode)
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_TRANSIENT, FaultOwner.INFRASTRUCTURE)


async def test_versions_do_not_go_back():  # P22
    engine = Engine(numbered("one", "done"), versions=(0, 3))
    async with playing(engine, Scorer(), update_mode=UpdateMode.TURN) as (client, episode, _):
        url = await opened(client)
        engine.requests.clear()
        one = {"role": "assistant", **await chat(client, url, [user("go")])}
        await chat(client, url, [user("go"), one, user("more")])
        await finish(client, url)
        played = checked(await episode)
    versions = [turn.version_spans[-1].version.number for turn in played.episode.turns if turn.role is Role.ASSISTANT]
    assert versions == sorted(versions)
    assert engine.requests[1].version == versions[0]
    assert {request.update_mode for request in engine.requests} == {UpdateMode.TURN}


async def test_a_cancelled_episode_lets_go():  # case X4
    engine = Engine(numbered("done"))
    async with playing(engine) as (client, episode, door):
        url = await opened(client)
        engine.gate.clear()
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={"messages": [user("go")]}))
        await engine.began.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert (await asking).status_code == 410
        assert (await client.post(f"{url}/finish")).status_code == 410
        assert door.state().open_episodes == 0
    assert engine.released == ["kit-run.t0.0.0"]


async def test_mistakes_that_cannot_be_read_come_back_as_text():
    engine = Engine(lambda prompt: [*call(1)[:-2], call(1)[-1]] if "again" not in prompt else say("done"))
    async with playing(engine, Scorer()) as (client, episode, _):
        url = await opened(client)
        first = {"role": "assistant", **await chat(client, url, [user("go")], tools=[TOOL])}
        assert "tool_calls" not in first
        assert "<|call|>" in first["content"]
        await chat(client, url, [user("go"), first, user("again")], tools=[TOOL])
        await finish(client, url)
        played = checked(await episode)
    assert played.episode.turns[1].status is Status.MODEL_INVALID_ACTION
    assert len(samples_of(played)) == 1


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(os.environ["HEADRACE_TASK"])
assert "SECRET_OF_THE_WORKER" not in os.environ
"""


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("", Status.ENV_TRANSIENT, "without an answer"),
        ("sys.exit('no box')", Status.ENV_TRANSIENT, "no box"),
        ("import time; time.sleep(600)", Status.ENV_TRANSIENT, "within 1 s"),
    ],
)
async def test_a_program_that_says_nothing(code, status, told, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "s")
    args = HarnessArgs(command=(sys.executable, "-c", PROGRAM + code))
    async with playing(
        Engine(numbered("done")), args=args, budgets=Budgets(4, 500, 1.0 if told == "within 1 s" else 30.0)
    ) as (
        _,
        episode,
        _,
    ):
        played = checked(await episode)
    assert played.episode.status is status
    assert told in played.episode.fault


async def test_what_a_program_left_behind_does_not_keep_its_episode_open():
    code = "import subprocess; subprocess.Popen(['sleep', '60']); sys.exit('no box')"
    args = HarnessArgs(command=(sys.executable, "-c", PROGRAM + code))
    async with playing(Engine(numbered("done")), args=args, budgets=Budgets(4, 500, 30.0)) as (_, episode, _):
        played = checked(await asyncio.wait_for(episode, 20))
    assert "no box" in played.episode.fault


async def test_the_same_plan_samples_with_the_same_seeds():
    seeds = []
    for _ in range(2):
        engine = Engine(numbered("done"))
        async with playing(engine, task=TASK) as (client, _, _):
            await chat(client, await opened(client), [user("go")])
        seeds.append([request.seed for request in engine.requests])
    assert seeds[0] == seeds[1]
    assert np.all(np.array(seeds) > 0)
