"""Whether an episode was granted what a call needs. Deny by default: the first grant that covers the call counts, and
without one it does not happen.

What is narrowed by paths or domains covers only calls that name some, all of them covered, and no commands or programs,
in which others could be named. Owns what a task may grant itself.
"""

import time
from collections.abc import Sequence

from headrace.actors.gateway.decisions.addresses import domain_fits, place_of
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.paths import readings
from headrace.actors.gateway.decisions.patterns import Patterns, fits, within
from headrace.actors.gateway.decisions.reading import texts
from headrace.actors.gateway.decisions.tier import needs_approval
from headrace.actors.gateway.policy import Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

_COULD_NAME_OTHERS = ("command", "code")


def check(asked: Asked, state: EpisodeState, now_s: float | None = None) -> Denial | None:
    """Decide whether the call is granted, and set `asked.grant`. Nothing is used up; see `spend`.

    Args:
        asked: the call.
        state: of its episode.
        now_s: monotonic seconds, now where None.
    """
    for capability in needed(asked.spec):
        found = _find(capability, asked, state, now_s)
        if isinstance(found, Denial):
            return found
        if asked.grant is None:
            asked.grant = state.grants[found]
    return None


def spend(asked: Asked, state: EpisodeState, now_s: float | None = None) -> Denial | None:
    """Use up what the call is granted by, where that is limited; looks at it again, as time has passed since."""
    for grant in state.grants:
        if grant.uses or grant.expires_s:
            break
    else:
        return None
    used = []
    for capability in needed(asked.spec):
        found = _find(capability, asked, state, now_s)
        if isinstance(found, Denial):
            return found
        used.append(found)
    for index in used:
        if state.grants[index].uses:
            state.uses[index] = state.uses.get(index, 0) + 1
    return None


def needed(spec: ToolSpec) -> tuple[Capability, ...]:
    """The capabilities that a call of a tool needs; one that cannot be undone needs a grant of that too."""
    capability = spec.capability
    if needs_approval(spec) and capability is not Capability.IRREVERSIBLE:
        return capability, Capability.IRREVERSIBLE
    return (capability,)


def not_granted(capability: Capability) -> str:
    """What the model is told where nothing grants a capability."""
    return f"{capability} is not granted"


def effective_grants(policy: Policy, task_grants: Sequence[Grant]) -> tuple[Grant, ...]:
    """The grants of an episode: its task's own where it has any, else the policy's.

    A task may grant what the policy grants anyway, or what its ceiling says; narrower than that, never wider. Uses that
    the ceiling limits are shared by all grants that lie under it.

    Raises:
        ConfigError: a grant of the task lies outside.
    """
    if not task_grants:
        return policy.grants
    ceiling = (*policy.grants, *policy.ceiling)
    uses_left = [grant.uses for grant in ceiling]
    for grant in task_grants:
        for index, limit in enumerate(ceiling):
            if _is_within(grant, limit) and (not limit.uses or grant.uses <= uses_left[index]):
                uses_left[index] -= grant.uses
                break
        else:
            raise ConfigError(
                f"the task grants itself {_shown(grant)}, which is more than permissions.tasks_may_grant lets it"
            )
    return tuple(task_grants)


def _find(capability: Capability, asked: Asked, state: EpisodeState, now_s: float | None) -> int | Denial:
    """The position of the first grant that covers the call, or why there is none."""
    told: Denial | None = None
    for index, grant in enumerate(state.grants):
        if grant.capability is not capability or (grant.tools and not fits(asked.spec.name, grant.tools)):
            continue
        if grant.expires_s and (time.monotonic() if now_s is None else now_s) - state.began_s >= grant.expires_s:
            told = Denial("capability:expired", f"the grant of {capability} has expired")
        elif grant.uses and state.uses.get(index, 0) >= grant.uses:
            told = Denial("capability:uses", f"the grant of {capability} is used up after {grant.uses} calls")
        elif (grant.paths or grant.domains) and not _covers(grant, asked):
            told = Denial("capability:scope", f"{capability} is granted for {_scope(grant)} only")
        else:
            return index
    return told or Denial(f"capability:{capability}", not_granted(capability))


def _covers(grant: Grant, asked: Asked) -> bool:
    has_path = has_url = False
    for kind, text in texts(asked):
        if kind in _COULD_NAME_OTHERS:
            return False
        if kind == "path" and grant.paths:
            has_path = True
            if not _path_fits(text, grant.paths):
                return False
        elif kind == "url" and grant.domains:
            has_url = True
            if not _url_fits(text, grant.domains):
                return False
    return (has_path or not grant.paths) and (has_url or not grant.domains)


def _path_fits(path: str, patterns: Patterns) -> bool:
    """A folder fits too where all that lies in it does: `src` and `src/*`."""
    try:
        normals = readings(path)
    except ValueError:
        return False
    return all(fits(normal, patterns) or fits(f"{normal}/", patterns) for normal in normals)


def _url_fits(url: str, patterns: Patterns) -> bool:
    try:
        return domain_fits(place_of(url).host, patterns)
    except ValueError:
        return False


def _is_within(inner: Grant, outer: Grant) -> bool:
    return (
        inner.capability is outer.capability
        and within(inner.tools, outer.tools)
        and within(inner.paths, outer.paths)
        and within(inner.domains, outer.domains)
        and (not outer.expires_s or 0 < inner.expires_s <= outer.expires_s)
        and (not outer.uses or 0 < inner.uses <= outer.uses)
    )


def _scope(grant: Grant) -> str:
    return " and ".join(", ".join(patterns[:10]) for patterns in (grant.paths, grant.domains) if patterns)


def _shown(grant: Grant) -> str:
    limits = [*grant.tools, *grant.paths, *grant.domains]
    limits += [f"{grant.expires_s:g} s"] * bool(grant.expires_s) + [f"{grant.uses} uses"] * bool(grant.uses)
    return f"{grant.capability} ({', '.join(limits)})" if limits else str(grant.capability)
