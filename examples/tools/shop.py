"""A shop assistant. Prices change daily, so it has to look them up, and it multiplies with a calculator."""

import headrace


def price(item: str, session: headrace.Session) -> int:
    """What one piece costs today.

    Args:
        item: the goods, in the plural, such as pears
    """
    if item not in session.task["prices"]:
        raise headrace.ToolError(f"no {item} today")
    return session.task["prices"][item]


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def reward(completion: str, total: int) -> bool:
    """Whether the customer was told the right total."""
    return completion == str(total)


Shop = headrace.ToolUse("orders.jsonl", tools=[price, multiply], reward=reward)
