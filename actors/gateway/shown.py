"""What the model is shown of a call: one way for denials, one for outputs, in the process and in its clients.

A client makes the results of what it performs itself, so that a read need not wait for a second answer. These functions
depend on the call, its tool and the policy alone.
"""

from headrace.actors.gateway.decisions import output
from headrace.actors.gateway.decisions.asked import Denial
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.actors.gateway.policy import Policy
from headrace.platform.contracts import ToolOutput, ToolResult
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

GATEWAY = "gateway"
UNSENDABLE = "\0unsendable"
"""The one argument of a call whose own cannot be sent: they hold numbers or characters that no JSON text may hold."""
_MOST_SOURCE = 200
_READ = SideEffectTier.READ
OUTSIDE = (Capability.NETWORK, Capability.SECRET)


def is_strong(spec: ToolSpec) -> bool:
    """Whether a call may reach something that outlasts the episode or lies outside of it: nothing of it may be lost
    from audit and journal."""
    return spec.capability in OUTSIDE or tier_of(spec) is not _READ


def denied(denial: Denial) -> ToolResult:
    """The answer to a call that does not happen."""
    told = f"{'error' if denial.invalid else 'blocked'}: {denial.told}"
    return ToolResult(told, "deny", False, GATEWAY, True, denial.rule, denial.invalid)


def shown(call: ToolCall, spec: ToolSpec, policy: Policy, given: ToolOutput) -> ToolResult:
    """What a call gave, bounded and with nothing in it that is more than text."""
    text, _ = output.fit(given.content, policy.output_kb * 1024)
    return result_of(call, spec, ToolOutput(text, given.ok))


def result_of(call: ToolCall, spec: ToolSpec, given: ToolOutput) -> ToolResult:
    """The result of an output that is as the model may see it."""
    return ToolResult(given.content, "allow", given.ok, source_of(call, spec), spec.trusted)


def source_of(call: ToolCall, spec: ToolSpec) -> str:
    """Where the output of a call is from: the tool, and what it fetched, without the part that may hold secrets."""
    for name, kind in spec.reads.items():
        if kind == "url" and isinstance(url := call.arguments.get(name), str):
            return f"tool:{call.name} {url.partition('?')[0].partition('#')[0][:_MOST_SOURCE]}"
    return f"tool:{call.name}"
