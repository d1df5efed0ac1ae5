"""A guard between a scripted world and a gateway that says what it is told to."""

from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.gateway.policy import Policy
from headrace.platform.contracts import Audited, CallVerdict, ToolResult
from headrace.platform.hashing import hash_value
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Cost, Message, Observation, StepResult, Task, ToolCall, ToolSpec
from headrace.platform.records.permissions import Safety
from headrace.platform.records.status import Role

TASK = Task("t", "world")
DENIED = CallVerdict(
    ToolResult("blocked: no", "deny", ok=False, source="gateway", trusted=True, rule="capability:network")
)
UNKNOWN = CallVerdict(ToolResult("error: no tool", "deny", ok=False, rule="schema:unknown_tool", invalid=True))


def found(text):
    return CallVerdict(ToolResult(text, source="tool:search"), lasting=True)


class Door:
    """A gateway that says what it is told to: by tool, a verdict, or an exception."""

    def __init__(self, verdicts=(), specs=(), cut=1000):
        self.verdicts, self.specs, self.cut = dict(verdicts), specs, cut
        self.decided, self.settled, self.opened, self.told, self.closed = [], [], [], [], 0

    async def __call__(self):
        return self

    async def mounted(self, mounts):
        return self.specs

    def session(self, scope, policy, tools, grants=(), trusted=()):
        self.opened.append((scope, [tool.name for tool in tools], grants, trusted))
        return self

    async def decide(self, calls, key):
        self.decided.append((key, [call.name for call in calls]))
        answers = [self.verdicts.get(call.name, CallVerdict()) for call in calls]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def settle(self, outputs, key):
        self.settled.append((key, [output.content for output in outputs]))
        return [ToolResult(output.content[: self.cut], source="tool:world") for output in outputs]

    def recorded(self, calls):
        self.told.append([call.name for call in calls])

    async def close(self):
        self.closed += 1
        return Audited("chain:3:ab", Safety(calls=2, violations=1))


class World:
    name, version = "world", "1"
    provenance = Provenance()

    def __init__(self, answer=None, tools=("get", "put")):
        self.seen, self.closed = [], 0
        self._answer = answer or self._each
        self._tools = tuple(ToolSpec(name) for name in tools)

    def tools(self):
        return self._tools

    async def reset(self, task, seed):
        return Observation((Message(Role.USER, "find it"),), hash_value("start"))

    async def step(self, message, key):
        self.seen.append([call.name for call in message.tool_calls])
        return self._answer(message)

    async def close(self):
        self.closed += 1

    @staticmethod
    def _each(message):
        told = tuple(
            Message(Role.TOOL, f"{c.name} says {c.arguments}", tool_call_id=c.call_id) for c in message.tool_calls
        )
        return StepResult(told, cost=Cost(tool_calls=len(told)), state_hash=hash_value(len(told)))


def says(*names, **arguments):
    return Message(Role.ASSISTANT, tool_calls=tuple(ToolCall(n, arguments, f"c{i}") for i, n in enumerate(names)))


async def guarded(door, world=None, policy=None):
    session = GuardedEnvironment(world or World(), policy or Policy(), door)
    await session.reset(TASK, 1)
    return session
