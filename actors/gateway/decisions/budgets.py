"""How many calls an episode may make, how fast, and what they may cost.

The last decision on a call that happens: it alone uses things up, after all others have agreed, all of them at once:
calls, calls of the tool, writes, money, and uses of grants. A call that is denied costs nothing.
"""

import time

from headrace.actors.gateway.decisions import capability, tier
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState


def check(asked: Asked, state: EpisodeState, now_s: float | None = None) -> Denial | None:
    """Decide whether the call is within its budgets, and spend them.

    Args:
        asked: the call.
        state: of its episode.
        now_s: monotonic seconds, now where None.
    """
    spec, limits = asked.spec, state.policy.budgets
    made_of = state.calls_of.get(spec.name, 0)
    if limits.calls and state.calls >= limits.calls:
        return Denial("budget:calls", f"all {limits.calls} calls are made")
    if (most := limits.calls_of.get(spec.name, 0)) and made_of >= most:
        return Denial("budget:calls_of", f"all {most} calls of {spec.name} are made")
    if limits.money and state.money + spec.price > limits.money:
        left = max(0.0, limits.money - state.money)
        return Denial("budget:money", f"{spec.name} costs {spec.price:g}, and {left:g} is left")
    # Another turn may have spent them while this call was waiting for its approval.
    if (denial := tier.check(asked, state) or capability.spend(asked, state, now_s)) is not None:
        return denial
    tier.spend(asked, state)
    state.calls += 1
    state.calls_of[spec.name] = made_of + 1
    state.money += spec.price
    return None


def wait_s(state: EpisodeState, now_s: float | None = None, most_s: float | None = None) -> float:
    """How long the call has to wait for its turn, in seconds; takes the turn, unless the wait is longer than `most_s`.

    Args:
        state: of its episode.
        now_s: monotonic seconds, now where None.
        most_s: a caller that would not wait longer says so, and then holds up no later call.
    """
    rate = state.policy.budgets.calls_per_s
    if rate <= 0:
        return 0.0
    now = time.monotonic() if now_s is None else now_s
    turn_s = max(now, state.next_call_s)
    if most_s is None or turn_s - now <= most_s:
        state.next_call_s = turn_s + 1 / rate
    return turn_s - now
