"""What the checks of an environment run against, and what of its answers they compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.platform.contracts import Environment
from headrace.platform.hashing import canonical_text
from headrace.platform.records.message import HashPair, Message, Observation, StepResult, Task
from headrace.platform.testing.conformance.support import settled


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentContext:
    """What the suite runs against.

    `make` returns a fresh session. `script` ends the episode of `task` and `seed` with its last message and not
    before; three messages or more check the most. `effect` is a message that changes the state hash each time it is
    applied, to prove that a new key is a new effect; None for a world that can only be read. `deadline_s` is how long
    one call may take.
    """

    make: Callable[[], Environment]
    task: Task
    script: Sequence[Message]
    seed: int = 0
    effect: Message | None = None
    deadline_s: float = 30.0

    async def begin(self, seed: int | None = None) -> tuple[Environment, Observation]:
        """A session that has been reset."""
        session = self.make()
        return session, await settled(session.reset(self.task, self.seed if seed is None else seed))

    async def play(self, session: Environment, start: int = 0, stop: int | None = None, branch: str = "a") -> list[str]:
        """Play part of the script; one comparable text a step."""
        steps = list(enumerate(self.script))[start:stop]
        return [as_text(await settled(session.step(message, f"{branch}/{n}"))) for n, message in steps]


def as_text(record: Observation | StepResult) -> str:
    """All that must be the same when it is played again. A raw hash counts where there is no canonical one; seconds
    that a tool took are measured, and no two runs agree on them."""
    if record.state_hash.canonical:
        record = msgspec.structs.replace(record, state_hash=HashPair("", record.state_hash.canonical))
    if isinstance(record, StepResult) and record.cost.tool_s:
        record = msgspec.structs.replace(record, cost=msgspec.structs.replace(record.cost, tool_s=0.0))
    return canonical_text(msgspec.json.encode(record).decode())


def check_same(found: Sequence[str], expected: Sequence[str], what: str) -> None:
    """Raises AssertionError that names the first step whose text differs."""
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert left == right, f"{what} different at its step {number}: {left} instead of {right}"
