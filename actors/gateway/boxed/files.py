"""`files`: read, search, write and edit files of the workspace, as the sandbox sees them."""

import shlex

from headrace.actors.gateway.boxed.shell import told
from headrace.platform.contracts import Sandbox, ToolOutput
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

_SEARCH_S = 20.0
_MOST_LINES = 2000
_MOST_MATCHES = 200
_PATH = {"type": "string", "minLength": 1, "description": "Relative to the workspace."}


def _spec(name: str, description: str, properties: dict[str, object], required: list[str], writes: bool) -> ToolSpec:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    capability, tier = (Capability.WRITE, SideEffectTier.WRITE) if writes else (Capability.READ, SideEffectTier.READ)
    return ToolSpec(name, description, parameters, capability, tier, {"path": "path"})


READ = _spec(
    "read_file",
    f"Read a text file, its lines numbered from 1. At most {_MOST_LINES} lines at once.",
    {"path": _PATH, "first_line": {"type": "integer", "minimum": 1}, "last_line": {"type": "integer", "minimum": 1}},
    ["path"],
    writes=False,
)
SEARCH = _spec(
    "search_files",
    "Search files for an extended regular expression, as grep -E has it; answers with PATH:LINE:TEXT. At most"
    f" {_MOST_MATCHES} matches.",
    {"pattern": {"type": "string", "minLength": 1}, "path": {**_PATH, "default": "."}},
    ["pattern"],
    writes=False,
)
WRITE = _spec(
    "write_file",
    "Create or replace a text file, with the folders above it.",
    {"path": _PATH, "content": {"type": "string"}},
    ["path", "content"],
    writes=True,
)
EDIT = _spec(
    "edit_file",
    "Replace a piece of a text file. `old` must occur exactly once.",
    {"path": _PATH, "old": {"type": "string", "minLength": 1}, "new": {"type": "string"}},
    ["path", "old", "new"],
    writes=True,
)


async def read(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform a `read_file` call."""
    path = str(arguments["path"])
    text, problem = await _text_of(box, path)
    if problem:
        return ToolOutput(problem, ok=False)
    lines = text.splitlines()
    first, last = _number(arguments, "first_line", 1), _number(arguments, "last_line", len(lines))
    if lines and first > len(lines):
        return ToolOutput(f"{path} has {len(lines)} lines", ok=False)
    shown = lines[first - 1 : min(last, first + _MOST_LINES - 1)]
    numbered = [f"{number}\t{line}" for number, line in enumerate(shown, start=first)]
    if first - 1 + len(shown) < min(last, len(lines)):
        numbered.append(f"[{len(lines)} lines in all; go on from first_line {first + len(shown)}]")
    return ToolOutput("\n".join(numbered) or "[the file is empty]")


async def search(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform a `search_files` call."""
    pattern, path = str(arguments["pattern"]), str(arguments.get("path", "."))
    search = f"grep -rnHIE -e {shlex.quote(pattern)} -- {shlex.quote(path)} | head -n {_MOST_MATCHES + 1}"
    command = f"(cd {shlex.quote(box.workspace)} && {search})"  # as all paths, wherever the shell has gone
    result = await box.run(command, min(_SEARCH_S, within_s))
    lines = result.output.splitlines()
    if result.limit or (result.exit_code and not lines):
        return told(result)
    if not lines:
        return ToolOutput("[no match]")
    more = [f"[more than {_MOST_MATCHES} matches; narrow the pattern or the path]"]
    return ToolOutput("\n".join(lines[:_MOST_MATCHES] + (more if len(lines) > _MOST_MATCHES else [])))


async def write(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform a `write_file` call."""
    path, content = str(arguments["path"]), str(arguments["content"])
    return await _written(box, path, content, f"wrote {path}: {len(content.splitlines())} lines")


async def edit(box: Sandbox, arguments: dict[str, object], within_s: float) -> ToolOutput:
    """Perform an `edit_file` call."""
    path, old, new = str(arguments["path"]), str(arguments["old"]), str(arguments["new"])
    text, problem = await _text_of(box, path)
    if problem:
        return ToolOutput(problem, ok=False)
    if (count := text.count(old)) != 1:
        return ToolOutput(f"`old` occurs {count} times in {path}; it must occur exactly once", ok=False)
    return await _written(box, path, text.replace(old, new), f"edited {path}")


async def _text_of(box: Sandbox, path: str) -> tuple[str, str]:
    """A file's text, and what is wrong with it where it cannot be had."""
    try:
        return (await box.read(path)).decode(), ""
    except UnicodeDecodeError:
        return "", f"{path} is not UTF-8 text"
    except FileNotFoundError:
        return "", f"there is no file {path}"
    except OSError as error:
        return "", f"{path} cannot be read: {error.strerror or error}"


async def _written(box: Sandbox, path: str, content: str, said: str) -> ToolOutput:
    try:
        await box.write(path, content.encode())
    except OSError as error:
        return ToolOutput(f"{path} cannot be written: {error.strerror or error}", ok=False)
    return ToolOutput(said)


def _number(arguments: dict[str, object], name: str, default: int) -> int:
    value = arguments.get(name, default)
    return value if isinstance(value, int) else default


TOOLS = ((READ, read), (SEARCH, search), (WRITE, write), (EDIT, edit))
