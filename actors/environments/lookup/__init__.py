"""`lookup`: a hidden key-value store that a tiny model learns to read with a tool.

"find k07" asks for the value behind k07. `get k07` answers `k07=v31`, or `k07=@k19`: look there instead. One or two
reads, then the value as the answer; a blind guess is right once in a hundred.
"""

from headrace.actors.environments.lookup.demonstrator import demonstrations
from headrace.actors.environments.lookup.environment import LookupEnvironment
from headrace.actors.environments.lookup.sandboxed import SandboxedLookup
from headrace.actors.environments.lookup.tasks import LookupTasks
from headrace.actors.environments.lookup.vocabulary import tokenizer_files

__all__ = ["LookupEnvironment", "LookupTasks", "SandboxedLookup", "demonstrations", "tokenizer_files"]
