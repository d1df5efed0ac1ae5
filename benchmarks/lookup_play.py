"""`lookup` played in plain Python over any function that generates: for a peer's rollouts, and as the measure of both.

The world is told in four lines, without sessions, records, seeds or gateways. Prompts, what is appended after a turn,
and how sampled tokens are read are the product's renderer, so that the policy sees the same tokens. What cannot be read
ends the episode without a reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.platform.contracts import Renderer
from headrace.platform.records import Message, Role, Task

MAX_TURNS, NEW_TOKENS = 4, 16
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts to what is sampled after each, with its stop token."""


@dataclass(kw_only=True, slots=True)
class Play:
    """An episode: the prompt, what follows, and for each token of that whether the policy sampled it."""

    task: Task
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0

    def add(self, token_ids: Sequence[int], sampled: bool) -> None:
        """Append a turn."""
        self.completion += token_ids
        self.mask += [int(sampled)] * len(token_ids)


def play(renderer: Renderer, tasks: Sequence[Task], generate: Generate) -> list[Play]:
    """One episode for each of `tasks`, all at once, turn by turn."""
    plays = [Play(task=task, prompt=renderer.render([_opening(task)], ())) for task in tasks]
    live = plays
    for _ in range(MAX_TURNS):
        sampled = generate([one.prompt + one.completion for one in live])
        live = [one for one, token_ids in zip(live, sampled, strict=True) if _goes_on(renderer, one, token_ids)]
        if not live:
            break
    return plays


@torch.no_grad()
def success(renderer: Renderer, tasks: Sequence[Task], model: Any) -> float:
    """Mean reward of one sampled episode for each of `tasks`."""

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        return [upto_stop(row, renderer.stop_token_ids) for row in found[:, width:].tolist()]

    plays = play(renderer, tasks, generate)
    return sum(one.reward for one in plays) / len(plays)


def upto_stop(token_ids: list[int], stops: Sequence[int]) -> list[int]:
    """`token_ids` up to and with the first stop token."""
    ends = [at for at, token in enumerate(token_ids) if token in stops]
    return token_ids[: ends[0] + 1] if ends else token_ids


def _opening(task: Task) -> Message:
    return Message(Role.USER, f"find {task.data['chain'][0]}")


def _goes_on(renderer: Renderer, one: Play, token_ids: list[int]) -> bool:
    """Take a sampled turn in, and the world's answer; whether there is another turn."""
    one.add(token_ids, sampled=True)
    said = renderer.parse(token_ids)
    if said.error or not said.tool_calls:
        one.reward = float(not said.error and said.content == one.task.data["answer"])
        return False
    key = str(said.tool_calls[0].arguments.get("key", ""))
    answer = Message(Role.TOOL, _read(one.task, key))
    after = renderer.bridge([answer], ended=token_ids[-1] in renderer.stop_token_ids)
    if after is None:
        raise ValueError("lookup's template only appends")
    one.add(after, sampled=False)
    return True


def _read(task: Task, key: str) -> str:
    chain = task.data["chain"]
    if key not in chain:
        return "?"
    index = chain.index(key)
    return f"{key}=@{chain[index + 1]}" if index + 1 < len(chain) else f"{key}={task.data['answer']}"
