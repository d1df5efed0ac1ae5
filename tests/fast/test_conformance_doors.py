"""Conversations conform: the fake, and a door over a scripted engine. The suite finds those that do not."""

import asyncio
import contextlib
import itertools

import pytest
from episode_kit import make_plan
from harness_kit import TASK, Engine, make_door, say

from headrace.actors.harness.environment import HarnessArgs, HarnessEnvironment
from headrace.actors.harness.play import Doorway, play_harness
from headrace.platform.contracts import OpenedEpisode
from headrace.platform.records import Message, Role
from headrace.platform.testing.conformance.doors import DOOR_SUITE, DoorContext
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.fakes.doors import ScriptedConversations


def scripted(kind=ScriptedConversations):
    @contextlib.asynccontextmanager
    async def make():
        waiting = [
            OpenedEpisode(
                episode=f"ep-{number}",
                messages=(Message(Role.USER, "go"),),
                metadata={},
                deadline_s=9.0,
                max_turns=9,
                max_tokens=999,
            )
            for number in range(2)
        ]
        counter = itertools.count()
        yield kind(lambda asked: f"answer {next(counter)}", waiting)

    return make


@contextlib.asynccontextmanager
async def real():
    counter = itertools.count()
    engine = Engine(lambda prompt: say(f"answer {next(counter)}"))
    door, args = make_door(engine), HarnessArgs()
    doorway = Doorway(door=door, args=args)
    playing = [
        asyncio.create_task(play_harness(make_plan(TASK), HarnessEnvironment(args), engine, doorway)) for _ in range(2)
    ]
    try:
        yield door
    finally:
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


@pytest.mark.parametrize("make", [scripted(), real], ids=["fake", "door"])
@pytest.mark.parametrize("name", DOOR_SUITE)
async def test_conversations_conform(name, make):  # P24
    await DOOR_SUITE[name](DoorContext(make=make))


class Forgets(ScriptedConversations):
    async def answer(self, asked, episode=""):
        self._check(episode) if episode else None
        answer = self._answered(asked)
        if episode:
            self._open[episode].append((asked, answer))
        return answer


class Believes(ScriptedConversations):
    async def finish(self, episode, info):
        return await super().finish(episode, {})


class Reopens(ScriptedConversations):
    def _check(self, episode):
        self._over.pop(episode, None)
        self._open.setdefault(episode, [])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Forgets, "the_same_is_not_sampled_twice: the same request got another answer"),
        (Believes, "clients_give_no_rewards: reward is not refused"),
        (Reopens, "a_finished_episode_is_over: an answer after the end is not refused"),
    ],
)
async def test_the_suite_finds(kind, told):
    with pytest.raises(AssertionError, match=told):
        await run_suite(DOOR_SUITE, DoorContext(make=scripted(kind)))
