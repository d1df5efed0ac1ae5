"""The random states of a process that trains, torch's and NumPy's, as bytes."""

import io
from typing import Any

import numpy as np
import torch


def random_state() -> bytes:
    """The present states."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [
        str(name),
        torch.from_numpy(np.asarray(keys, np.int64)),
        int(position),
        int(has_gauss),
        float(cached),
    ]
    buffer = io.BytesIO()
    torch.save({"torch": torch.get_rng_state(), "numpy": numpy_state}, buffer)
    return buffer.getvalue()


def set_random_state(data: bytes) -> None:
    """Take up what `random_state` returned."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
