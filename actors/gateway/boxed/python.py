"""`python`: a program in a fresh interpreter of the sandbox."""

import shlex

from headrace.actors.gateway.boxed.shell import TIMEOUT, seconds_of, told
from headrace.platform.contracts import Sandbox, ToolOutput
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

_FILE = ".program.py"

SPEC = ToolSpec(
    name="python",
    description="Run a Python program in a fresh interpreter, in the working directory. Print what you want to see.",
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "minLength": 1},
            "timeout_s": TIMEOUT,
        },
        "required": ["code"],
        "additionalProperties": False,
    },
    capability=Capability.WRITE,
    tier=SideEffectTier.WRITE,
    reads={"code": "code"},
)


async def run(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform a `python` call. The program is a file, so that it may read its standard input and be of any length."""
    path = f"/tmp/{_FILE}"
    try:
        await box.write(path, str(arguments["code"]).encode())
    except OSError as error:
        return ToolOutput(f"the program cannot be written to {path}: {error.strerror or error}", ok=False)
    return told(await box.run(f"python3 {shlex.quote(path)} </dev/null", seconds_of(arguments, within_s)))


TOOLS = ((SPEC, run),)
