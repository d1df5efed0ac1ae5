"""Several clients of one episode at random: they go on, branch, edit, retry, leave, and the engine fails them.

Whatever they do, what the engine has sampled is recorded once, behind exactly the tokens that it was sampled from.
"""

import asyncio
import random

import numpy as np
import pytest
from harness_kit import TOOL, Engine, Scorer, call, checked, opened, playing, say, system, user

from headrace.platform.errors import EngineDead
from headrace.platform.records import Budgets, FaultOwner, Role
from headrace.trainer.samples import build_samples


class Unreliable(Engine):
    """Answers late, at random, or not at all; `sampled` is what it has answered, by key."""

    def __init__(self, dice):
        super().__init__(lambda prompt: dice.choice([say("one"), say(" one "), say("two"), list(b"cut"), call(2)]))
        self.dice, self.sampled = dice, {}

    async def generate(self, request):
        assert request.key not in self.sampled, "a key is asked for twice"
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)
        if self.dice.random() < 0.15:
            raise EngineDead("gone")
        generation = await super().generate(request)
        self.sampled[request.key] = request, generation
        return generation


def next_request(dice, histories):
    """Something to ask: a history that was told, perhaps changed, and headers."""
    said = list(dice.choice(histories))
    if dice.random() < 0.1:
        said.insert(0, system(dice.choice("AB")))
    if dice.random() < 0.1 and len(said) > 2:
        del said[dice.randrange(len(said) - 1)]
    headers = {}
    if dice.random() < 0.2:
        headers["Idempotency-Key"] = dice.choice("abc")
    if dice.random() < 0.2:
        headers["x-stainless-retry-count"] = "1"
    return {"messages": said, "tools": [TOOL] if dice.random() < 0.5 else []}, headers


async def talk(client, url, dice, histories):
    for _ in range(dice.randrange(2, 8)):
        body, headers = next_request(dice, histories)
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, headers=headers))
        if dice.random() < 0.15:
            for _ in range(dice.randrange(8)):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            continue
        response = await asking
        assert response.status_code in (200, 400, 409, 410, 503), response.text
        if response.status_code == 410:
            return
        if response.status_code == 200:
            told = response.json()["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": each["id"], "content": "r"} for each in told.get("tool_calls", ())
            ]
            histories.append([*body["messages"], told, *(results or [user(dice.choice("xy"))])])


@pytest.mark.parametrize("seed", range(25))
async def test_everything_is_recorded_once_and_exactly(seed):  # P24, cases T1, T3, T18
    dice = random.Random(seed)
    engine = Unreliable(dice)
    budgets = Budgets(dice.choice([3, 8, 40]), dice.choice([120, 2000]), 60.0)
    async with playing(engine, Scorer(), budgets=budgets) as (client, episode, _):
        url, histories = await opened(client), [[user("go")]]
        await asyncio.gather(*(talk(client, url, dice, histories) for _ in range(dice.choice([1, 3, 6]))))
        await client.post(f"{url}/finish")
        record = checked(await asyncio.wait_for(episode, 20)).episode
    left = list(engine.sampled.values())
    for view in record.views:
        turn = record.turns[view.turn]
        seen = np.concatenate([each.token_ids for span in view.spans for each in record.turns[slice(*span)]])
        (found,) = [
            (request, generation)
            for request, generation in left
            if request.seed == turn.seed
            and np.array_equal(request.token_ids, seen)
            and np.array_equal(generation.token_ids, turn.token_ids)
        ]
        left = [each for each in left if each[0].key != found[0].key]
    assert not left
    assert {request.session for request in engine.requests} <= set(engine.released)  # P19
    if record.fault_owner is FaultOwner.NONE:
        samples = build_samples(record, [1.0] * len(record.views))
        sampled = sum(len(turn.token_ids) for turn in record.turns if turn.role is Role.ASSISTANT)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
