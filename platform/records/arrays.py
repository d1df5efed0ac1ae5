"""Per-token arrays: their types, and how they travel.

Owns the three dtypes that records use (little-endian i32, u8 and f32) and the msgpack hooks that carry them as raw
bytes. An array that came off the wire is a read-only view of the message it arrived in: nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {1: np.dtype("<i4"), 2: np.dtype("u1"), 3: np.dtype("<f4")}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
# Bound once: an episode has dozens of arrays, and the hooks below are half of what its codec costs.
_Ext, _frombuffer = msgspec.msgpack.Ext, np.frombuffer


def i32(values: Sequence[int] | I32) -> I32:
    """`values` as an i32 array, shape [L]."""
    return np.array(values, dtype=np.int32)


def f32(values: Sequence[float] | F32) -> F32:
    """`values` as an f32 array, shape [L]."""
    return np.array(values, dtype=np.float32)


def enc_hook(value: object) -> msgspec.msgpack.Ext:
    """Encode an array as a msgpack extension of raw bytes.

    Raises:
        NotImplementedError: for any other type, or an array of another dtype.
    """
    if isinstance(value, np.ndarray) and (code := _CODE_OF_DTYPE.get(value.dtype)):
        return _Ext(code, value.tobytes())
    raise NotImplementedError(f"headrace records hold i32, u8 and f32 arrays; cannot encode {type(value).__name__}")


def ext_hook(code: int, data: memoryview) -> npt.NDArray[Any]:
    """Decode what `enc_hook` wrote.

    Raises:
        ValueError: for an extension code that headrace does not know.
    """
    if code not in _DTYPE_OF_CODE:
        raise ValueError(f"unknown array code {code}; this message was not written by headrace")
    return _frombuffer(data, _DTYPE_OF_CODE[code])
