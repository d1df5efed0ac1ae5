"""The filter of `sft.stages[].filter`: a small language over facts about a stored episode.

Python's own parser reads it; only comparisons of the facts below with numbers and texts, joined by `and`, `or` and
`not`, get through. Nothing is ever executed, and a comparison of a number with a text is found before any episode is
read.
"""

import ast
import itertools
import operator
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from headrace.platform.errors import ConfigError

Value = float | str | tuple[float | str, ...]
_Read = Callable[[Mapping[str, Value]], Any]

FIELDS: dict[str, type] = {
    "score": float,
    "turns": float,
    "tokens": float,
    "version": float,
    "environment": str,
    "split": str,
    "purpose": str,
    "status": str,
    "task_id": str,
}
"""What a filter may name, and whether it is a number or a text."""
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


class EpisodeFilter:
    """A parsed filter; `names` are the facts that it looks at.

    Raises:
        ConfigError: the text is not of this language; the message lists what may be named.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            with warnings.catch_warnings(action="ignore"):  # the parser's, of code that is refused anyway
                tree = ast.parse(text.strip(), mode="eval").body
            self._takes = self._condition(tree)
        except ConfigError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._wrong("it cannot be read") from None
        self.names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))

    def takes(self, facts: Mapping[str, Value]) -> bool:
        """Whether an episode with these facts, one for each of `FIELDS`, is chosen."""
        return bool(self._takes(facts))

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(
            f'filter {self.text!r}: {why}. Write comparisons such as "score >= 1 and turns <= 3 and environment =='
            f" 'lookup'\"; known: {', '.join(FIELDS)}"
        )

    def _condition(self, node: ast.expr) -> _Read:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(each) for each in node.values]
            together = all if isinstance(node.op, ast.And) else any
            return lambda facts: together(part(facts) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated = self._condition(node.operand)
            return lambda facts: not negated(facts)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        raise self._wrong(f"`{ast.unparse(node)}` is no comparison")

    def _comparison(self, node: ast.Compare) -> _Read:
        """One comparison, or a chain such as 1 <= turns <= 3."""
        operands = [self._operand(each) for each in (node.left, *node.comparators)]
        steps: list[tuple[Callable[[Any, Any], Any], _Read, _Read]] = []
        for op, ((left_kind, left), (right_kind, right)) in zip(node.ops, itertools.pairwise(operands), strict=True):
            compare = _COMPARISONS.get(type(op))
            is_membership = isinstance(op, ast.In | ast.NotIn)
            if compare is None or is_membership != right_kind.startswith("list of "):
                raise self._wrong(f"`{ast.unparse(node)}` compares in a way that is not known here")
            if left_kind != right_kind.removeprefix("list of "):
                raise self._wrong(f"`{ast.unparse(node)}` compares a {left_kind} with a {right_kind}")
            steps.append((compare, left, right))
        return lambda facts: all(compare(left(facts), right(facts)) for compare, left, right in steps)

    def _operand(self, node: ast.expr) -> tuple[str, _Read]:
        """The kind of an operand ("number", "text", "list of …") and how it is read."""
        if isinstance(node, ast.Name):
            if node.id not in FIELDS:
                near = get_close_matches(node.id, FIELDS, n=1)
                raise self._wrong(f"there is no {node.id!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            name = node.id
            return _kind(FIELDS[name]()), lambda facts: facts[name]
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and node.elts:
            items = tuple(self._constant(each) for each in node.elts)
            kinds = {_kind(item) for item in items}
            if len(kinds) > 1:
                raise self._wrong(f"`{ast.unparse(node)}` mixes numbers and texts")
            return f"list of {kinds.pop()}", lambda facts: items
        constant = self._constant(node)
        return _kind(constant), lambda facts: constant

    def _constant(self, node: ast.expr) -> float | str:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, int | float) and not isinstance(value, bool):
                return sign * value
            if isinstance(value, str) and sign == 1:
                return value
        raise self._wrong(f"`{ast.unparse(node)}` is neither a name, a number nor a text")


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else "number"
