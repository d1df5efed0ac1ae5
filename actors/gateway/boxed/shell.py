"""`shell`: a command line in the sandbox's own shell, whose working directory and variables last."""

from headrace.platform.contracts import CommandResult, Sandbox, ToolOutput
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

LONGEST_S = 25.0
"""What a command may take at most; less than a step's default deadline, so that the model is told (P27)."""
_USUAL_S = 20.0
TIMEOUT: dict[str, object] = {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_S}
"""The schema of a command's own limit."""

SPEC = ToolSpec(
    name="shell",
    description=(
        "Run a command in a shell that keeps its working directory and variables. Answers with its output, and with its"
        " exit code where that is not 0."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "minLength": 1},
            "timeout_s": TIMEOUT,
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    capability=Capability.WRITE,
    tier=SideEffectTier.WRITE,
    reads={"command": "command"},
)


async def run(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform a `shell` call."""
    return told(await box.run(str(arguments["command"]), seconds_of(arguments, within_s)))


def seconds_of(arguments: dict[str, object], within_s: float) -> float:
    """How long a call lets its command take."""
    asked = arguments.get("timeout_s", _USUAL_S)
    return min(float(asked) if isinstance(asked, int | float) else _USUAL_S, LONGEST_S, within_s)


def told(result: CommandResult) -> ToolOutput:
    """A command's result for the model: its output, then what ended it where that is not success (P27)."""
    lines = [result.output.rstrip("\n")] if result.output else []
    if result.truncated_bytes:
        lines.append(f"[{result.truncated_bytes} bytes of output were left out]")
    if result.limit:
        lines.append(f"[stopped: it reached its limit of {result.limit}]")
    elif result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    return ToolOutput("\n".join(lines) or "[no output]", ok=result.exit_code == 0)


TOOLS = ((SPEC, run),)
