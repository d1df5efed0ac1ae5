"""A model as the files of a Hugging Face folder, in memory.

The constant files (configuration, tokenizer) are made once; `weight_file` serialises the tensors alone, so that
publishing a small model after every step is cheap. Tied tensors are written once, under their first name.

The safetensors format is written here, with one copy of the tensors: the library's `save` makes three, and holds the
interpreter all the while, so that no heartbeat gets through. What is written is the same to the byte.
"""

import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

WEIGHT_FILE = "model.safetensors"
_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names, in the order in which it lays tensors out."""
_PIECE = 1 << 24
"""Bytes that are copied before other threads get their turn."""


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Every small file of a model folder that is neither weights, nor the model's configuration, nor the report of its
    supervised stages."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in _TOKENIZER_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.name not in ("config.json", "generation_config.json", "stages.json")
    }


def constant_files(model: Any, tokenizer: Mapping[str, bytes]) -> dict[str, bytes]:
    """config.json, generation_config.json where the model has one, and the tokenizer's files."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        made = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return made | dict(tokenizer)


def weight_file(model: torch.nn.Module) -> bytes:
    """The model's parameters and persistent buffers as safetensors."""
    return tensor_file(model.state_dict())


def tensor_file(state: Mapping[str, Tensor]) -> bytes:
    """A model's state as safetensors."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.detach().cpu().contiguous()
    return serialised(tensors)


def serialised(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors of a CPU as safetensors: eight bytes with the header's length, the header as JSON, padded to eight
    bytes, then the tensors' bytes."""
    layout = list(_DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (layout.index(item[1].dtype), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    buffer = io.BytesIO()
    buffer.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, tensor in ordered:
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), _PIECE):
            buffer.write(raw[start : start + _PIECE])
    return buffer.getvalue()


def load_weight_file(model: torch.nn.Module, data: bytes) -> None:
    """Copy tensors that `weight_file` wrote into `model`, in place.

    Raises:
        ValueError: when names or shapes are not those of `model`.
    """
    own = model.state_dict()
    tensors = load(data)
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"the weights hold {name} {tuple(tensor.shape)}, which this model does not have")
    covered = {own[name].data_ptr() for name in tensors}
    missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in covered)
    if missing:
        raise ValueError(f"the weights lack {missing[0]} and {len(missing) - 1} more tensors of this model")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
