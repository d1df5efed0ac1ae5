"""Grading recorded episodes again with the graders of today: a changed grader changes scores as a worse model does.

Grades are compared by grader version, kind and value; what a grader writes as evidence is not. A grader that fails (it
raised, or outran its deadline) says nothing: where its version is as recorded, that is an interruption and no
difference.
"""

from collections.abc import Iterable, Sequence

import msgspec

from headrace.actors.plan import AsyncScorer
from headrace.actors.replaying.report import ReplayReport, difference_of_texts
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent
from headrace.platform.records.status import FaultOwner
from headrace.platform.records.tables import RewardRow


async def graded_again(
    report: ReplayReport, episode: Episode, rewards: Sequence[RewardRow], grader: AsyncScorer | None
) -> ReplayReport:
    """`report` with what the grader of today says of `episode`, whose stored rewards are given; None where it has none.

    An episode that ended by a fault was never graded, and is not now.
    """
    recorded = [row for row in rewards if row.grader_version]
    if episode.fault_owner is not FaultOwner.NONE or (grader is None and not recorded):
        return report
    version = grader.version if grader is not None else ""
    components = await _graded(grader, episode) if grader is not None else ()
    is_same = {row.grader_version for row in recorded} == {version}
    if is_same and not all(row.valid for row in recorded):
        return report  # it failed then, so there is no grade to compare
    failed = next((each.evidence for each in components if not each.valid), None)
    if is_same and failed is not None:
        told = report.interrupted or f"the grader {version} failed: {failed}"
        return msgspec.structs.replace(report, interrupted=told) if report.first_divergence is None else report
    before = _told((row.grader_version, row.kind, row.value if row.valid else None) for row in recorded)
    now = _told((version, each.kind, each.value if each.valid else None) for each in components)
    if before == now:
        return report
    found = difference_of_texts(report.steps, "grader", before, now)
    first = report.steps if report.first_divergence is None else report.first_divergence
    return msgspec.structs.replace(
        report, first_divergence=first, differences=(*report.differences, found), interrupted=""
    )


async def _graded(grader: AsyncScorer, episode: Episode) -> Sequence[RewardComponent]:
    """What it says; once more where it failed, for a process may have died."""
    components = await grader.score(episode.task, episode)
    if all(each.valid for each in components):
        return components
    return await grader.score(episode.task, episode)


def _told(grades: Iterable[tuple[str, str, float | None]]) -> str:
    """All of them, in whatever order they were given."""
    return "\n".join(
        sorted(f"{kind} {'invalid' if value is None else value} by {version}" for version, kind, value in grades)
    )
