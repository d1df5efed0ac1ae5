"""What the tests of an episode share: plans, the lookup renderer, engines that say words, worlds that misbehave."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.actors.environments.adapter import NOWHERE, AsyncEnvironment
from headrace.actors.environments.lookup import LookupTasks
from headrace.actors.environments.lookup.vocabulary import tokenizer_files
from headrace.actors.episode import play_episode
from headrace.actors.plan import AsyncScorer, EpisodePlan, PlayedEpisode
from headrace.actors.rendering import load_renderer
from headrace.actors.rendering.template import TemplateRenderer
from headrace.actors.rendering.tool_formats import build_tool_format
from headrace.platform.contracts import Renderer
from headrace.platform.fidelity import check_episode
from headrace.platform.records import (
    AttemptId,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    SamplingParams,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
    VersionRef,
    VersionSpan,
    f32,
    i32,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import END, CharRenderer

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# The history that this template shows ends with the last thing said before: earlier assistant turns lose their text.
FORGETFUL = """\
{%- for message in messages -%}
{%- if message.role == "assistant" -%}<|im_start|>assistant
(said)<|im_end|>
{%- else -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# As FORGETFUL, but only what was thought is stripped, as reasoning models' templates do (case T17).
UNTHINKING = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1].lstrip() if message.role == 'assistant' else message.content }}",
)


def lookup_renderer(folder: Path) -> TemplateRenderer:
    """The renderer of the lookup recipe, loaded from files as a run loads it."""
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    renderer = load_renderer(folder)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def byte_tokenizer(merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = ("<|im_start|>", "<|im_end|>")):
    """A byte-level BPE tokenizer with these merges, in this order, and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def chatml_renderer(template: str = CHATML, merges: Sequence[tuple[str, str]] = ()) -> TemplateRenderer:
    return TemplateRenderer(byte_tokenizer(merges), template, build_tool_format("hermes", {}), ["<|im_end|>"])


def make_plan(task: Task | None = None, *, sample: int = 0, **fields) -> EpisodePlan:
    values = {
        "attempt_id": AttemptId("kit-run", 0, sample),
        "task": task or Task("t", "counter", {"target": 3}),
        "seed": 7,
        "version": VersionRef("scripted", 0),
        "sampling": SamplingParams(max_new_tokens=200, stop_token_ids=(END,)),
        "request_deadline_s": 10.0,
        "reset_deadline_s": 10.0,
        "step_deadline_s": 10.0,
    }
    return EpisodePlan(**{**values, **fields})


def lookup_task(position: int = 0, hops: Sequence[int] = (2,)) -> Task:
    source = LookupTasks("train", 5, hops)
    source.restore(position)
    (task,) = source.next(1)
    return task


def turn_of(request: GenerationRequest) -> int:
    """Which turn of its episode a request asks for."""
    return int(request.key.rsplit("/", 1)[1])


def says(*replies: Sequence[int], **options) -> ScriptedEngine:
    """An engine whose n-th turn of any episode is the n-th reply; the last one is said again and again."""
    return ScriptedEngine(lambda request: replies[min(turn_of(request), len(replies) - 1)], **options)


def char_call(amount: int) -> list[int]:
    """What the fake renderer's policy samples to add `amount`, without an end token."""
    return CharRenderer().render([Message(Role.ASSISTANT, tool_calls=(ToolCall("add", {"amount": amount}),))], ())[1:-2]


DONE = [*b"done", END]


def lookup_words(renderer: TemplateRenderer, *texts: str) -> list[list[int]]:
    """Sampled turns of the lookup world, each with its end token."""
    return [
        [*renderer._scaffold.encode(text, add_special_tokens=False).ids, *renderer.stop_token_ids] for text in texts
    ]


def lookup_solution(renderer: TemplateRenderer, task: Task) -> list[list[int]]:
    chain = task.data["chain"]
    return lookup_words(renderer, *(f"<call>get {key}</call>" for key in chain), task.data["answer"])


def generation(ids: Sequence[int], finish: FinishReason = FinishReason.STOP, version: int = 0) -> Generation:
    """A whole generation, for engines that do not behave."""
    spans = (VersionSpan(VersionRef("scripted", version), 0, len(ids)),)
    return Generation(i32(ids), f32([-0.5] * len(ids)), finish, spans)


class World:
    """An async environment made of two functions; counts what happens to it."""

    name = "world"
    version = "1"
    provenance = NOWHERE

    def __init__(
        self,
        step: Callable[[Message], StepResult | Awaitable[StepResult]] | None = None,
        reset: Callable[[], Observation | Awaitable[Observation]] | None = None,
    ) -> None:
        self._step = step or (lambda message: ends(1.0))
        self._reset = reset or (lambda: Observation((Message(Role.USER, "go"),)))
        self.messages: list[Message] = []
        self.keys: list[str] = []
        self.closed = 0
        self.resets: list[tuple[Task, int]] = []

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    async def reset(self, task: Task, seed: int) -> Observation:
        self.resets.append((task, seed))
        answer = self._reset()
        return await answer if isinstance(answer, Awaitable) else answer

    async def step(self, message: Message, key: str) -> StepResult:
        self.messages.append(message)
        self.keys.append(key)
        answer = self._step(message)
        return await answer if isinstance(answer, Awaitable) else answer

    async def close(self) -> None:
        self.closed += 1


def ends(value: float) -> StepResult:
    return StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, value),), terminated=True)


def goes_on(text: str = "more", **fields) -> StepResult:
    return StepResult(messages=(Message(Role.TOOL, text),), **fields)


def raises(error: BaseException) -> Callable[..., StepResult]:
    def act(*_: object) -> StepResult:
        raise error

    return act


async def never(*_: object) -> StepResult:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def play(
    environment: AsyncEnvironment,
    engine,
    renderer: Renderer | None = None,
    plan: EpisodePlan | None = None,
    scorer: AsyncScorer | None = None,
) -> PlayedEpisode:
    """Play, and check what holds for every episode whatever happened in it."""
    played = await play_episode(plan or make_plan(), environment, renderer or CharRenderer(), engine, scorer)
    episode = played.episode
    rewards = [row for row in played.rewards if row.kind.is_reward]
    unrewarded = not rewards or any(not row.valid for row in rewards)
    assert (played.score is None) == (episode.fault_owner != "none" or unrewarded)
    assert (played.score is None) == bool(played.cause)
    assert np.all([np.all(turn.action_mask <= (turn.role == Role.ASSISTANT)) for turn in episode.turns])
    check_episode(episode)
    assert episode_codec.encode(episode_codec.decode(episode_codec.encode(episode))) == episode_codec.encode(episode)
    return played


def sampled_ids(played: PlayedEpisode) -> list[list[int]]:
    return [turn.token_ids.tolist() for turn in played.episode.turns if turn.role is Role.ASSISTANT]


def whole_context(played: PlayedEpisode, segment: int = 0) -> list[int]:
    """Every token of a segment, in order."""
    return [token for turn in played.episode.turns if turn.segment == segment for token in turn.token_ids.tolist()]
