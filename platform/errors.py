"""Everything that headrace raises, drawn as a tree. Each leaf is also a fitting builtin, and pickles.

::

    HeadraceError
    ├── ConfigError (ValueError)            the recipe or command line is wrong; the message names the fix
    ├── SchemaError (ValueError)            a record of a schema that this build does not read
    ├── FidelityError (ValueError)          an episode whose parts do not hold together
    ├── DeadlineExceeded (TimeoutError)     something did not answer within its deadline
    ├── NotFound (LookupError)              a run, episode or version that does not exist, or not uniquely
    ├── EnvironmentFault (RuntimeError)     an environment failed; `transient` says whether a fresh one may not
    │   ├── ExternalDivergence              it asks for what was not asked for when it was recorded
    │   └── InfrastructureFault             what it stands on failed: always transient, and not its fault
    │       ├── SandboxDied                 its sandbox is gone
    │       ├── HostAway                    the host that plays it is gone, full or draining
    │       ├── GatewayAway                 the tool gateway is gone, or did not decide in time
    │       └── InDoubt                     a side effect was begun, and nobody knows how it ended (P25)
    ├── SafetyBlock (RuntimeError)          the gateway ended the episode: nothing of it is graded
    ├── CannotBranch (RuntimeError)         the world does not come to the state that a branch begins from
    ├── EngineError (RuntimeError)          an engine could not serve a request
    │   ├── VersionUnavailable              no replica holds the version
    │   └── EngineDead                      the replica is gone
    ├── LedgerError (RuntimeError)          a ledger transition was refused
    │   ├── Fenced                          another learner holds the run
    │   ├── CommitRefused                   a commit precondition of P7 does not hold
    │   └── LedgerAway (ConnectionError)    the server cannot be reached; it may come back
    │       └── LedgerRewound               the server is back without its last writes, or with none (P8)
    ├── DoorRefused (RuntimeError)          a client asked the public door for what it does not give
    ├── RegistryError (RuntimeError)        a version is torn, altered or already taken
    └── RunFailed (RuntimeError)            the run cannot go on; the message names the cause
        ├── PartDied                        a process of the run is gone
        └── DiskFull (OSError)              what must be durable has no room (P23)
"""


class HeadraceError(Exception):
    """The root of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """The recipe or the command line is wrong. The message names the key and the fix."""


class SchemaError(HeadraceError, ValueError):
    """A stored or received record is of a schema that this build does not read."""


class FidelityError(HeadraceError, ValueError):
    """An episode does not hold together. Its attributes say which rule broke."""


class DeadlineExceeded(HeadraceError, TimeoutError):
    """Something did not answer in time. The message says what was waited for and how long."""


class NotFound(HeadraceError, LookupError):
    """A named run, episode, version, recipe or environment does not exist, or a prefix is not unique."""


class EnvironmentFault(HeadraceError, RuntimeError):
    """An environment failed, through no fault of the model.

    `transient` faults are retried in a fresh environment; others quarantine the task.
    """

    def __init__(self, message: str, transient: bool = True) -> None:
        super().__init__(message, transient)
        self.transient = transient

    def __str__(self) -> str:
        return str(self.args[0])


class ExternalDivergence(EnvironmentFault):
    """In a re-execution, a world asked for something that was not asked for at that step when it was recorded."""

    def __init__(self, message: str, transient: bool = False) -> None:
        super().__init__(message, transient)


class InfrastructureFault(EnvironmentFault):
    """What an environment stands on has failed; a fresh one, elsewhere, may not (case E13)."""

    def __init__(self, message: str, transient: bool = True) -> None:
        super().__init__(message, transient)


class SandboxDied(InfrastructureFault):
    """A sandbox is gone: killed, over a limit that ends it, or never up."""


class HostAway(InfrastructureFault):
    """The environment host of a session is gone, or no host can take one."""


class GatewayAway(InfrastructureFault):
    """The tool gateway cannot be reached, or did not decide in time; the call did not happen."""


class InDoubt(InfrastructureFault):
    """A side effect was begun and its result was never seen; it is not run again (P25)."""


class SafetyBlock(HeadraceError, RuntimeError):
    """The gateway could not decide on a call, or the episode's violations are too many: it may not go on."""


class CannotBranch(HeadraceError, RuntimeError):
    """The world at hand does not come to the state that the branch was to begin from: there is no such episode."""


class EngineError(HeadraceError, RuntimeError):
    """An inference engine could not serve a request."""


class VersionUnavailable(EngineError):
    """No replica holds the version that a request is pinned to."""


class EngineDead(EngineError):
    """The replica went away."""


class LedgerError(HeadraceError, RuntimeError):
    """A ledger transition was refused."""


class Fenced(LedgerError):
    """Another learner has taken the run over, or it was stopped; whoever sees this must stop."""


class CommitRefused(LedgerError):
    """A precondition of a commit (P7) does not hold."""


class LedgerAway(LedgerError, ConnectionError):
    """The ledger's server cannot be reached now. The step may or may not have happened; it may be tried again."""


class LedgerRewound(LedgerAway):
    """The server has restarted, or has seen less than this client has (P8): nothing goes on until the ledger was
    reconciled with the manifest chain."""


class DoorRefused(HeadraceError, RuntimeError):
    """The public door does not give what a client asks for. `code` is one of `RefusalCode` and says why; `field` names
    the part of the request that is wrong, empty where it is no part of it."""

    def __init__(self, message: str, code: str = "invalid_request", field: str = "") -> None:
        super().__init__(message, code, field)
        self.code = code
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class RegistryError(HeadraceError, RuntimeError):
    """A version's blob is torn, altered, or its number is taken."""


class RunFailed(HeadraceError, RuntimeError):
    """The run cannot go on. The message names the cause."""


class PartDied(RunFailed):
    """A process of the run is gone; it is started again as long as the run makes progress."""


class DiskFull(RunFailed, OSError):
    """What must be durable cannot be written, as its disk or quota is full (P23). The message names the folder."""
