"""What each process of a run opens for itself: its log, its status, and its ways to the ledger and the registry."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.deploy.context import RunContext
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.contracts import Ledger, VersionRegistry
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.node_cache import node_cache
from headrace.platform.observability.logs import open_log
from headrace.platform.observability.parts import Part

if TYPE_CHECKING:
    from headrace.platform.ledger.redis_ledger import RedisLedger

Closing = Callable[[], Awaitable[None]]
CONNECT_DEADLINE_S = 30.0
_log = logging.getLogger(__name__)


def open_process_log(context: RunContext, name: str) -> logging.Handler:
    """Log to `logs/NAME.log`, with every secret that this process resolves taken out."""
    secrets = SecretValues()
    resolve(context.config.queue.redis_url, secrets)
    if context.door_token:
        secrets.add(context.door_token)
    return open_log(context.logs, name, secrets)


def version_cache() -> Path:
    """Where this node keeps copies of versions that lie elsewhere."""
    return node_cache() / "versions"


async def connect_ledger(context: RunContext) -> "RedisLedger":
    """This process's connection to the run's ledger, which raises at once when the server is away."""
    from headrace.platform.ledger.redis_ledger import RedisLedger

    return await RedisLedger.connect(
        resolve(context.ledger_url), context.run, context.limits, connect_deadline_s=CONNECT_DEADLINE_S
    )


def patient(context: RunContext, ledger: Ledger, part: Part, held: Callable[[], Sequence[int]] | None = None) -> Ledger:
    """The ledger as workers and the learner use it: they wait for a server that is away, and say so."""

    def say(text: str) -> None:
        _log.warning("%s", text)
        part.note(ledger=text)

    return PatientLedger(ledger, context.config.queue.away_deadline_s, say, held=held)


def open_part(context: RunContext, name: str) -> Part:
    """This process's status, written down from now on."""
    part = Part(context.root, name)
    part.start()
    return part


async def connect_registry(context: RunContext, ledger: Ledger) -> tuple[VersionRegistry, Closing]:
    """This process's view of the version registry in the run root."""
    from headrace.platform.registry.files import FileRegistry
    from headrace.platform.registry.redis_pins import RedisPins

    pins = await RedisPins.connect(resolve(context.ledger_url), context.run, connect_deadline_s=CONNECT_DEADLINE_S)
    registry = FileRegistry(context.root, ledger, cache_dir=version_cache(), run=context.run, pins=pins)
    return registry, registry.close
