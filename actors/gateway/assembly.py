"""The parts of a gateway process, put together. The one place that names them all."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.decisions.approvals import Approvals
from headrace.actors.gateway.journal import Journal
from headrace.actors.gateway.judging import Judge
from headrace.actors.gateway.perform.connector import Ways
from headrace.actors.gateway.perform.performers import Performers
from headrace.actors.gateway.performing import Performing
from headrace.actors.gateway.pipeline import Pipeline
from headrace.actors.gateway.server import Server


@dataclass(frozen=True, slots=True)
class Gateway:
    """A server with what has to be closed after it."""

    server: Server
    audit: AuditLog
    journal: Journal
    performers: Performers

    @property
    def failure(self) -> OSError | None:
        """What ended audit or journal: this process can allow nothing any more, while a new one may."""
        return self.audit.failure or self.journal.failure

    async def close(self) -> None:
        """End what performs, then bring everything to disk. Raises OSError where something is not."""
        await self.performers.close()
        try:
            self.journal.close()
        finally:
            self.audit.close()


def assemble(
    home: Path, arguments: argparse.Namespace, token: str, clock: Callable[[], float], ways: Ways | None = None
) -> Gateway:
    """A gateway by the arguments of its process, which see. Raises OSError."""
    journal = Journal(home, arguments.flush_s)
    audit = AuditLog(arguments.audit, arguments.flush_s, home)
    performers = Performers(*ways) if ways is not None else Performers()
    judge = Judge(Approvals(home), arguments.deadline_s / 2, clock)
    pipeline = Pipeline(
        audit,
        journal,
        judge,
        Performing(performers, arguments.deadline_s),
        each=arguments.mode == "each",
        clock=clock,
    )
    return Gateway(Server(pipeline, performers, journal, token, clock), audit, journal, performers)
