"""Close what was opened: `([{` wants `}])`. The prompts have no answers; the reward checks what the model writes."""

import headrace

CLOSER = {"(": ")", "[": "]", "{": "}"}


def reward(completion: str, prompt: str) -> float:
    """The share of characters that are right, each in its place."""
    due = [CLOSER[bracket] for bracket in reversed(prompt)]
    right = sum(said == wanted for said, wanted in zip(completion, due, strict=False))
    return right / max(len(completion), len(due))


Brackets = headrace.SingleTurn("prompts.jsonl", reward=reward)
