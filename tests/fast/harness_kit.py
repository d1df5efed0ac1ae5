"""A door over a scripted engine and the byte renderer, and a client of it without a network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx2
from episode_kit import make_plan

from headrace.actors.harness.asking import Language
from headrace.actors.harness.door import HarnessDoor
from headrace.actors.harness.environment import HarnessArgs, HarnessEnvironment
from headrace.actors.harness.play import Doorway, play_harness
from headrace.actors.plan import AsyncScorer, PlayedEpisode
from headrace.platform.contracts import TokenGenerator
from headrace.platform.fidelity import check_episode
from headrace.platform.records import GenerationRequest, Message, RewardComponent, RewardKind, Role, Task, ToolCall
from headrace.platform.records.codec import episode_codec
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import END, VOCABULARY, CharRenderer
from headrace.serving.openai.app import build_app

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LANGUAGE = Language(renderer=CharRenderer(), encode=lambda text: list(text.encode()), vocabulary=VOCABULARY)
TASK = Task("t1", "harness", {"prompt": "go", "answer": "done", "hint": "h"})


def say(text: str) -> list[int]:
    return [*text.encode(), END]


def call(amount: int) -> list[int]:
    """What the renderer reads as a call of the tool."""
    return CharRenderer().render([Message(Role.ASSISTANT, tool_calls=(ToolCall("add", {"amount": amount}),))], ())[1:-1]


class Engine(ScriptedEngine):
    """Says what `replies` says to the prompt's text; counts, and waits where it is told to."""

    def __init__(self, replies: Callable[[str], Sequence[int]], **options: Any) -> None:
        super().__init__(lambda request: replies(CharRenderer().decode(request.token_ids.tolist())), **options)
        self.requests: list[GenerationRequest] = []
        self.released: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Event()

    async def generate(self, request: GenerationRequest):
        self.requests.append(request)
        self.began.set()
        await self.gate.wait()
        return await super().generate(request)

    async def release(self, session: str) -> None:
        self.released.append(session)
        await super().release(session)


def numbered(*texts: str) -> Callable[[str], list[int]]:
    """The n-th request is answered by the n-th text, the last one again and again."""
    left = list(texts)
    return lambda prompt: say(left.pop(0) if len(left) > 1 else left[0])


def make_door(engine: TokenGenerator, **options: Any) -> HarnessDoor:
    values = {"max_tokens": 2000, "deadline_s": 10.0, "finish_s": 10.0}
    return HarnessDoor(LANGUAGE, engine, "policy", engine.versions, **{**values, **options})


class Scorer:
    """1 where the last turn says what the task wants; remembers what it was shown."""

    version = "kit/1"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def score(self, task, episode):
        self.seen.append(episode)
        right = episode.turns[-1].content == task.data["answer"]
        return (RewardComponent(RewardKind.OUTCOME, float(right)),)

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def client_of(door: HarnessDoor, token: str = "", **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(build_app(door, token=token))
    async with httpx2.AsyncClient(transport=transport, base_url="http://door", headers=headers) as client:
        yield client


@contextlib.asynccontextmanager
async def playing(
    engine: Engine, scorer: AsyncScorer | None = None, args: HarnessArgs | None = None, **plan: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, asyncio.Task[PlayedEpisode], HarnessDoor]]:
    """An episode on offer, and a client that can take it."""
    door = make_door(engine)
    args = args or HarnessArgs(shown=("hint",))
    attempt = make_plan(plan.pop("task", TASK), **plan)
    episode = play_harness(attempt, HarnessEnvironment(args), engine, Doorway(door=door, args=args), scorer)
    task = asyncio.create_task(episode)
    try:
        async with client_of(door) as client:
            yield client, task, door
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def opened(client: httpx2.AsyncClient) -> str:
    """The URL of an episode that is waiting."""
    response = await client.post("/episodes", json={"wait_s": 5})
    assert response.status_code == 201, response.text
    return response.json()["base_url"].removesuffix("/v1")


async def chat(client: httpx2.AsyncClient, url: str, messages: list[dict], headers: dict | None = None, **more: Any):
    """The message of an answer."""
    response = await client.post(f"{url}/v1/chat/completions", json={"messages": messages, **more}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def checked(played: PlayedEpisode) -> PlayedEpisode:
    """What holds for every episode."""
    check_episode(played.episode)
    again = episode_codec.decode(episode_codec.encode(played.episode))
    assert episode_codec.encode(again) == episode_codec.encode(played.episode)
    return played
