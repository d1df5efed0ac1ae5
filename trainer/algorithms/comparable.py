"""Which episodes may be compared: those that played the same task in the same world under the same seeds.

Otherwise the luck of the draw would pass for the skill of the policy: the seed is the block of the comparison.
"""

from collections.abc import Sequence

from headrace.platform.contracts import ScoredEpisode


def check_comparable(group: Sequence[ScoredEpisode], least: int, name: str) -> None:
    """Raises ValueError for fewer than `least` episodes (one or two), or members that differ in what they played."""
    if len(group) < least:
        raise ValueError(f"a group of {len(group)} has no baseline; {name} needs at least two episodes")
    first = _played(group[0])
    for member in group[1:]:
        if _played(member) != first:
            raise ValueError(
                f"{member.episode.episode_id} played {_played(member)} and {group[0].episode.episode_id} {first}"
                " (environment, version, task, task version, task seed, environment seed): the members of a group"
                " must be equal in all of these"
            )


def _played(member: ScoredEpisode) -> tuple[str, str, str, str, int, int]:
    episode, task = member.episode, member.episode.task
    return (episode.environment, episode.environment_version, task.task_id, task.version, task.seed, episode.seed)
