"""Writes the data of the examples: tasks, and the chats that a tiny model starts from.

The chats come from a colleague in a hurry, who is right only some of the time. A model that imitates them knows how to
talk and what the tools are for; to be right is left to reinforcement learning. No chat is about a task that a model is
evaluated on. Run it from anywhere; the same rows come out every time.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import Message, Role, Task
from headrace.actors.targets import load_target

HERE = Path(__file__).parent
Rows = list[dict[str, Any]]

CLOSER = {"(": ")", "[": "]", "{": "}"}
GOODS = ("apples", "beans", "dates", "figs", "grapes", "leeks", "lemons", "limes", "melons", "olives", "pears", "plums")
MOVES = ("north", "east", "south", "west")


def said(role: str, content: str) -> dict[str, Any]:
    """A message in words."""
    return {"role": role, "content": content}


def called(name: str, arguments: dict[str, Any], result: object) -> Rows:
    """A tool call and its result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, said("tool", str(result))]


def tool(name: str, **types: str) -> dict[str, Any]:
    """A tool as chats name it."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def brackets(rng: random.Random) -> dict[str, Rows]:
    """For examples/reward: every bracket is closed by the right kind in half of the cases, and by any in the others."""
    drawn = dict.fromkeys("".join(rng.choice("([{") for _ in range(rng.randint(1, 5))) for _ in range(2000))
    prompts = rng.sample(list(drawn), len(drawn))
    chats = []
    for prompt in prompts[:100] * 3:
        due = [CLOSER[bracket] for bracket in reversed(prompt)]
        answer = "".join(rng.choice((closer, rng.choice(")]}"))) for closer in due)
        chats.append({"messages": [said("user", prompt), said("assistant", answer)]})
    return {"prompts.jsonl": [{"prompt": prompt} for prompt in prompts[100:]], "chats.jsonl": chats}


def orders(rng: random.Random) -> dict[str, Rows]:
    """For examples/tools: a price or a total is guessed in more than half of the chats."""
    drawn = []
    for _ in range(900):
        prices = {item: rng.randint(2, 9) for item in rng.sample(GOODS, 3)}
        item, count = rng.choice(list(prices)), rng.randint(2, 9)
        drawn.append({"prompt": f"{count} {item}", "prices": prices, "total": count * prices[item]})
    tools = [tool("price", item="string"), tool("multiply", a="integer", b="integer")]
    return {
        "orders.jsonl": drawn[300:],
        "chats.jsonl": [{"messages": _sale(order, rng), "tools": tools} for order in drawn[:300]],
    }


def _sale(order: dict[str, Any], rng: random.Random) -> Rows:
    count, item = order["prompt"].split()
    one, total = order["prices"][item], order["total"]
    guesses = rng.choice(("nothing", "nothing", "price", "price", "total"))
    messages = [said("user", order["prompt"])]
    if guesses == "price":
        one = rng.randint(2, 9)
        total = int(count) * one
    else:
        messages += called("price", {"item": item}, one)
    if guesses == "total":
        total = rng.randint(2, 9) * rng.randint(2, 9)
    else:
        messages += called("multiply", {"a": int(count), "b": one}, total)
    return [*messages, said("assistant", str(total))]


def deliveries(rng: random.Random) -> dict[str, Rows]:
    """For examples/environment: three steps of five go anywhere."""
    courier, _ = load_target(f"{HERE}/environment/courier.py:Courier")
    chats = []
    for row in rng.sample(courier.tasks("train", 0), 200):
        world = courier()
        seen: Sequence[Any] = world._reset(Task("made", "courier", row), 0).messages
        messages: Rows = []
        while seen:
            messages.append(said("user", seen[0].content))
            towards = seen[0].content.split()[1:]
            word = rng.choice(MOVES if rng.random() < 0.6 else towards)
            messages.append(said("assistant", word))
            seen = world._step(Message(Role.ASSISTANT, word)).messages
        chats.append({"messages": messages})
    return {"chats.jsonl": chats}


EXAMPLES = {"reward": brackets, "tools": orders, "environment": deliveries}


def made(folder: str) -> dict[str, Rows]:
    """File name to rows, for the example in `folder`."""
    return EXAMPLES[folder](random.Random(0))


def main() -> None:
    """Write every file beside its example."""
    for folder in EXAMPLES:
        for name, rows in made(folder).items():
            lines = [json.dumps(row, separators=(",", ":")) for row in rows]
            (HERE / folder / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
