"""Potential-based shaping: denser rewards under which the best policy stays the best.

F(s, s') = gamma * potential(s') - potential(s) (Ng, Harada and Russell 1999, "Policy invariance under reward
transformations", theorem 1). Over an episode the terms telescope: the discounted sum of F is gamma^K * potential(s_K) -
potential(s_0). The second part does not depend on the actions; the first does, unless it is 0. So the potential of a
terminal state counts as 0, whatever it is said to be (Grzes 2017, "Reward shaping in episodic reinforcement learning"):
without that term a policy is paid for ending where the potential is high. Whatever ended an episode, its
last state is terminal unless the value of that state is added to the return; then it keeps its potential, and that
value is one under shaped rewards.

The potential must be a function of the state (or belief). Of a mere observation that leaves out what matters, the
guarantee does not hold. Dimension: K steps.
"""

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def shaping_rewards(potentials: F64, gamma: float, *, goes_on: bool = False) -> F64:
    """F of every step, f64[K], to be added to the rewards of the same steps.

    Args:
        potentials: f64[K + 1], of the states before each step and after the last.
        gamma: the discount per step that the returns are computed with; another one breaks the guarantee.
        goes_on: whether the value of the last state is added, so that it is no end.

    Raises:
        ValueError: for fewer than two potentials: there is no step.
    """
    if len(potentials) < 2:
        raise ValueError(f"{len(potentials)} potentials are no step; one before each step and one after the last")
    after = potentials[1:].copy()
    if not goes_on:
        after[-1] = 0.0
    shaped: F64 = gamma * after - potentials[:-1]
    return shaped
