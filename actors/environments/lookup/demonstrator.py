"""Who shows the model how lookup is played: an oracle, or one that sometimes guesses.

The imperfect demonstrator guesses a value at one random turn of a share of its traces, instead of reading on. A model
that imitates it is the baseline that reinforcement learning has to surpass.
"""

import random
from collections.abc import Iterator

from headrace.actors.environments.lookup.tasks import LookupTasks
from headrace.actors.environments.lookup.vocabulary import VALUES
from headrace.platform.contracts import Renderer
from headrace.platform.records.message import Message, ToolCall
from headrace.platform.records.status import Role
from headrace.platform.seeding import derive_seed


def demonstrations(
    renderer: Renderer, tasks: LookupTasks, guess_share: float, seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Endless traces as (token ids, action mask), both of length L; 1 marks what the demonstrator said."""
    rng = random.Random(derive_seed("demonstrator", seed, str(guess_share)))
    while True:
        (task,) = tasks.next(1)
        chain, answer = task.data["chain"], task.data["answer"]
        guess_turn = rng.randrange(len(chain)) if rng.random() < guess_share else None
        yield _trace(renderer, chain, answer, guess_turn, rng)


def _trace(
    renderer: Renderer, chain: list[str], answer: str, guess_turn: int | None, rng: random.Random
) -> tuple[list[int], list[int]]:
    opening = Message(Role.USER, f"find {chain[0]}")
    token_ids = renderer.render([opening], ())
    mask = [0] * len(token_ids)
    for turn, key in enumerate(chain):
        if turn == guess_turn:
            return _say(renderer, token_ids, mask, Message(Role.ASSISTANT, rng.choice(VALUES)))
        token_ids, mask = _say(
            renderer, token_ids, mask, Message(Role.ASSISTANT, tool_calls=(ToolCall("get", {"key": key}),))
        )
        found = f"{key}=@{chain[turn + 1]}" if turn + 1 < len(chain) else f"{key}={answer}"
        bridge = renderer.bridge([Message(Role.TOOL, found)], ended=True)
        if bridge is None:
            raise ValueError("demonstrations need a template that only appends")
        token_ids, mask = token_ids + bridge, mask + [0] * len(bridge)
    return _say(renderer, token_ids, mask, Message(Role.ASSISTANT, answer))


def _say(renderer: Renderer, token_ids: list[int], mask: list[int], message: Message) -> tuple[list[int], list[int]]:
    """Append an assistant turn with its stop token, as a policy would have sampled it."""
    opening = Message(Role.USER)
    header = renderer.render([opening], ())
    closing = renderer.bridge([], ended=True) or []
    whole = renderer.render([opening, message], ())
    said = whole[len(header) : len(whole) - len(closing)]
    return token_ids + said, mask + [1] * len(said)
