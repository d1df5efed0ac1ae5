"""How long new weights take: wall time from the end of an optimizer step to the first token sampled under them.

The product's parts in one process, as they run in production, with their threads, on one event loop: `TorchBackend`
serialises, `Publisher` reserves a number, stages the files durably, writes the manifest and commits; a `Replica` that
follows the registry notices, pins, opens (every file's hash is checked), and has its torch engine load; then one token
is sampled. The ledger is the one in memory. Optimizer steps are stood for by a change of every weight, which is not
measured. `--json` has each part as a row.

- `copy`: the floor. The published weight file, warm in the page cache, to a new file by `shutil.copyfile`; and the same
  made durable with fsync, as all that a manifest names must be. Systems take turns, repetition by repetition. What was
  removed before is off the disk before either begins.
- `fixed latency`: the same path with a model of a few kilobytes.

The ratio is the whole without the engine's own load over the durable copy, by medians; over the copy that is not
durable it is given too. It holds when it is at most `TARGET` and the fixed latency at most `LATENCY_TARGET_MS`. TMPDIR
says on which disk.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from common import cpu_s, result, row_of, table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from headrace import __version__
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import GenerationRequest, SamplingParams, VersionManifest, i32
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.hashing import local_file_hash
from headrace.platform.registry.pins import MemoryPins
from headrace.serving.replica import Replica
from headrace.serving.torch_engine import TorchEngine
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.consumption import NOTHING
from headrace.trainer.publisher import Publisher
from headrace.trainer.weights import WEIGHT_FILE

TARGET = 3.0
LATENCY_TARGET_MS = 50.0
LARGE = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 4096}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
POLICY = "bench"
KEPT = 2
PARTS = ("serialise", "reserve", "stage", "manifest", "commit, notice, pin", "verify", "load", "retire, first token")
Times = dict[str, float]


class Parts:
    """When the parts of one publication began and ended."""

    def __init__(self) -> None:
        self.began: Times = {}
        self.ended: Times = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """The block is `part`."""
        self.began[part] = time.perf_counter()
        yield
        self.ended[part] = time.perf_counter()

    def seconds(self) -> Times:
        """By part; what lies between two timed ones is the replica's way from the commit to its work and on."""
        self.began["commit, notice, pin"] = self.ended["manifest"]
        self.ended["commit, notice, pin"] = self.began["verify"]
        self.began["retire, first token"] = self.ended["load"]
        return {part: self.ended[part] - self.began[part] for part in PARTS}


class TimedRegistry(FileRegistry):
    """The product's registry with a stopwatch."""

    parts = Parts()

    async def stage(self, number: int, fence: int, files: Mapping[str, bytes]) -> tuple[str, dict[str, str], str]:
        """Timed."""
        with self.parts.timed("stage"):
            return await super().stage(number, fence, files)

    async def manifest(self, manifest: VersionManifest) -> None:
        """Timed."""
        with self.parts.timed("manifest"):
            await super().manifest(manifest)

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """Timed."""
        with self.parts.timed("verify"):
            return await super().open(version)


class TimedEngine(TorchEngine):
    """The product's engine with a stopwatch."""

    parts = Parts()

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Timed."""
        with self.parts.timed("load"):
            await super().load(manifest, path)


class Plant:
    """A learner's publishing side and a replica in one process, below `root`."""

    def __init__(self, root: Path, sizes: Mapping[str, int]) -> None:
        torch.manual_seed(0)
        heads = {"num_attention_heads": max(sizes["hidden_size"] // 64, 1), "max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
        self.backend = TorchBackend(model, LearnerConfig(threads=1))
        self.root = root
        ledger = MemoryLedger("bench", LedgerLimits(batch_groups=1, max_lag=8), time.time)
        self.registry = TimedRegistry(
            str(root), ledger, cache_dir=root / "cache", run="bench", pins=MemoryPins(time.time)
        )
        self.publisher = Publisher(
            ledger=ledger,
            registry=self.registry,
            checkpoints=CheckpointStore(str(root / "checkpoints")),
            policy_id=POLICY,
            keep_versions=KEPT,
            keep_checkpoints=1,
            world_size=1,
            clock=time.time,
            compute=asyncio.to_thread,
        )
        self.engine = TimedEngine(replica="r0", max_sessions=4, max_batch=4, max_positions=64, policy_id=POLICY)
        self.changed = asyncio.Event()

    async def publish(self) -> tuple[float, float, Times]:
        """One version, from the end of a step to its first token: wall seconds, CPU seconds, and wall by part."""
        with torch.no_grad():
            for parameter in self.backend.model.parameters():
                parameter.add_(1e-4)
        parts = self.registry.parts = self.engine.parts = Parts()
        gc.collect()
        used, began = cpu_s(), time.perf_counter()
        with parts.timed("serialise"):
            files = await asyncio.to_thread(self.backend.weights)
        with parts.timed("reserve"):
            number = await self.publisher.reserve()
        await self.publisher.publish(number, files, batches=1, consumed=NOTHING)
        while number not in self.engine.versions():
            self.changed.clear()
            await self.changed.wait()
        await self.engine.generate(a_request(number))
        ended = parts.ended["retire, first token"] = time.perf_counter()
        used = cpu_s() - used
        await self.engine.release(f"s{number}")
        await self.publisher.retain()
        return ended - began, used, parts.seconds()

    def weight_file(self) -> Path:
        """Of the newest version."""
        return max(self.root.glob(f"versions/f*/{WEIGHT_FILE}"))


def a_request(version: int) -> GenerationRequest:
    """One token of a new session."""
    return GenerationRequest(
        key=f"s{version}/0",
        session=f"s{version}",
        token_ids=i32([1, 2, 3, 4]),
        version=version,
        seed=version,
        sampling=SamplingParams(max_new_tokens=1),
    )


def settle(folder: Path) -> None:
    """Have the file system finish what was removed, which it else does during the next fsync."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def copies(source: Path, target: Path) -> tuple[float, float]:
    """Seconds to copy a file that is in the page cache, and until the copy is durable."""
    began = time.perf_counter()
    shutil.copyfile(source, target)
    copied = time.perf_counter()
    with target.open("rb") as file:
        os.fsync(file.fileno())
    synced = time.perf_counter()
    target.unlink()
    return copied - began, synced - began


async def longest_silence(samples: list[float]) -> None:
    """Into `samples[0]`: the longest time for which the event loop did not come round. Until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        samples[0] = max(samples[0], time.perf_counter() - before)


async def measure(sizes: Mapping[str, int], repeats: int) -> dict[str, Any]:
    """The samples of `repeats` publications after two that warm up, seconds by name, and the size of the weights."""
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        plant = Plant(root, sizes)
        await plant.publisher.take_over("bench", True)
        replica = Replica(plant.engine, "r0")
        following = asyncio.create_task(replica.follow(plant.registry, KEPT, plant.changed.set))
        try:
            for repeat in range(repeats + 2):
                settle(root)
                silence = [0.0]
                watching = asyncio.create_task(longest_silence(silence))
                whole, used, parts = await plant.publish()
                watching.cancel()
                settle(root)
                file = plant.weight_file()
                began = time.perf_counter()
                local_file_hash(file)
                hashed = time.perf_counter() - began
                copied, synced = copies(file, root / "copy")
                if repeat < 2:
                    continue
                sample = {"whole": whole, "cpu": used, "hash": hashed, "copy": copied, "durable copy": synced}
                for name, seconds in {**sample, **parts, "silence": silence[0]}.items():
                    found[name].append(seconds)
            size = plant.weight_file().stat().st_size
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await plant.engine.close()
    return {"samples": found, "bytes": size}


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    large = asyncio.run(measure(LARGE, arguments.repeats))
    small = asyncio.run(measure(SMALL, 3 * arguments.repeats))
    middle = {name: statistics.median(samples) for name, samples in large["samples"].items()}
    beyond_load = middle["whole"] - middle["load"]
    ratio, plain_ratio = beyond_load / middle["durable copy"], beyond_load / middle["copy"]
    latency_ms = 1e3 * statistics.median(small["samples"]["whole"])
    rows = []
    for label, measured in ((f"{large['bytes'] / 1e6:.0f} MB", large), (f"{small['bytes'] / 1e3:.0f} KB", small)):
        for name, samples in measured["samples"].items():
            shown = {"whole": "headrace", "copy": "shutil.copyfile", "durable copy": "shutil.copyfile and fsync"}
            what = shown.get(name, f"part: {name}" if name in PARTS else name)
            rows.append(row_of(f"{label}, {what}", __version__, "ms", [1e3 * sample for sample in samples]))
    holds = ratio <= TARGET and latency_ms <= LATENCY_TARGET_MS
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(
        f"(whole - load) / durable copy {ratio:.2f} (target {TARGET}), / copy {plain_ratio:.2f}; fixed latency "
        f"{latency_ms:.1f} ms (target {LATENCY_TARGET_MS:g})\n"
    )
    if arguments.json:
        facts = {
            "ratio_to_copy_without_fsync": round(plain_ratio, 3),
            "fixed_latency_ms": round(latency_ms, 2),
            "fixed_latency_target_ms": LATENCY_TARGET_MS,
            "bytes": large["bytes"],
        }
        sys.stdout.write(result("weight_publish", ratio, TARGET, holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
