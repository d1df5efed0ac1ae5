"""Export: a version of a run, whole or an adapter, as a Hugging Face folder that loads to equal logits."""

import asyncio
import json
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from command_line import call_main
from run_kit import run_inprocess, small_config

from headrace.deploy.export import export_version
from headrace.deploy.model_card import lineage, stored_manifests
from headrace.platform.config import TinyLlamaConfig
from headrace.platform.errors import ConfigError, NotFound, RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.run_root import RunRoot
from headrace.platform.testing.conformance.ledger_harness import limits
from headrace.trainer.model import build_tiny_llama, load_folder, save_folder

USAGE, FAILED = 2, 1
TINY = TinyLlamaConfig(hidden=16, layers=2, heads=2, intermediate=32, max_positions=32)
TOKENIZER = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "<end>"}',
    "chat_template.jinja": b"{{ messages }}",
}
PROMPT = torch.arange(2, 12)[None]


def tiny(seed: int):
    return build_tiny_llama(TINY, 24, seed, pad_token_id=0, eos_token_id=1)


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def model_files(folder: Path, seed: int) -> dict[str, bytes]:
    save_folder(tiny(seed), folder, TOKENIZER)
    return folder_files(folder)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


class Run:
    """A run root whose versions are staged and listed as a learner does, without one."""

    def __init__(self, folder: Path) -> None:
        self.root = RunRoot.create(
            str(folder), "lookup-1f3a", "name: lookup\nenvironments: [{name: lookup}]\nmodel: {path: /m}\nseed: 5\n"
        )
        ledger = MemoryLedger(self.root.name, limits(), lambda: 0.0)
        self.registry = FileRegistry(
            self.root.url, ledger, cache_dir=folder / "cache", run=self.root.name, pins=MemoryPins(lambda: 0.0)
        )
        self.head: VersionManifest | None = None

    def publish(self, files: dict[str, bytes], kind: str = "full", base_hash: str = "") -> VersionManifest:
        async def publish() -> VersionManifest:
            number = 0 if self.head is None else self.head.ref.number + 1
            path, hashes, content_hash = await self.registry.stage(number, 3, files)
            manifest = VersionManifest(
                ref=VersionRef("policy", number, 3, base_hash=base_hash),
                parent=None if self.head is None else self.head.ref.number,
                parent_hash="" if self.head is None else self.head.content_hash,
                fence=3,
                kind=kind,
                content_hash=content_hash,
                batches=number,
                path=path,
                files=hashes,
            )
            await self.registry.manifest(manifest)
            return manifest

        self.head = asyncio.run(publish())
        return self.head

    def remove(self, keep: int) -> None:
        asyncio.run(self.registry.retain([keep], 0))


@pytest.fixture
def run(tmp_path) -> Run:
    """Three versions of a tiny model; the seed of each is its number."""
    made = Run(tmp_path / "runs")
    for number in range(3):
        made.publish(model_files(tmp_path / f"v{number}", number))
    return made


class TestWholeWeights:
    @pytest.mark.parametrize(("wanted", "number"), [("0", 0), ("v1", 1), ("latest", 2), ("best", 1)])
    def test_transformers_loads_the_version_to_equal_logits(self, wanted, number, run, tmp_path):
        run.root.write_best({"version": 1})
        done = export_version(run.root, wanted, tmp_path / "out")
        assert (done.version, done.merged) == (number, False)
        assert torch.equal(logits(load_folder(tmp_path / "out")), logits(tiny(number)))

    def test_files_are_those_of_the_version_and_a_card(self, run, tmp_path):
        done = export_version(run.root, "2", tmp_path / "out")
        stored, written = folder_files(tmp_path / "v2"), folder_files(tmp_path / "out")
        card = written.pop("README.md").decode()
        assert written == stored
        assert done.files == tuple(sorted([*stored, "README.md"]))
        assert run.head is not None and done.content_hash == run.head.content_hash
        for fact in ("lookup-1f3a, version 2", done.content_hash, "v2 ← v1 ← v0 (3 versions)", "| Seed | 5 |", "grpo"):
            assert fact in card
        assert str(tmp_path) not in card

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_tensors_can_be_converted(self, dtype, run, tmp_path):
        export_version(run.root, "2", tmp_path / "out", dtype=dtype)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
        converted = load_folder(tmp_path / "out")
        expected = tiny(2)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)).float())
        assert torch.equal(logits(converted), logits(expected))
        size = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
        weights = sum(p.numel() for p in tiny(2).parameters()) * size
        assert (tmp_path / "out" / "model.safetensors").stat().st_size < weights + 8192

    def test_a_version_that_retention_removed_lists_those_that_are_there(self, run, tmp_path):
        run.remove(keep=2)
        with pytest.raises(NotFound, match="no weights of version 1; there are 2"):
            export_version(run.root, "1", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_altered_weights_are_not_exported(self, run, tmp_path):
        assert run.head is not None
        with Path(run.root.url, run.head.path, "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x00")
        with pytest.raises(RegistryError, match=r"model\.safetensors is torn or altered"):
            export_version(run.root, "2", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    # P8
    def test_a_lineage_that_does_not_hold_together_is_refused(self, run, tmp_path):
        file = Path(run.root.url, "versions", "000000.json")
        forged = msgspec.structs.replace(msgspec.json.decode(file.read_bytes(), type=VersionManifest), content_hash="0")
        file.write_bytes(msgspec.json.encode(forged))
        with pytest.raises(RegistryError, match="version 1 was made from a version 0 with another content hash"):
            export_version(run.root, "2", tmp_path / "out")

    def test_lineage_ends_where_manifests_end(self, run):
        Path(run.root.url, "versions", "000000.json").write_bytes(b"{torn")
        assert run.head is not None and lineage(run.root, run.head) == [2, 1]
        assert [manifest.ref.number for manifest in stored_manifests(run.root)] == [1, 2]

    def test_nothing_is_left_when_the_export_breaks(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr("headrace.deploy.export.model_card", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_version(run.root, "2", tmp_path / "exports" / "out")
        assert list((tmp_path / "exports").iterdir()) == []


def adapter_of(base: Path, folder: Path):
    """An adapter with random weights over the model in `base`; peft's own model of both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load_folder(base), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    return model.eval()


class TestAdapters:
    def published(self, run: Run, tmp_path: Path, named: str, base_hash: str = ""):
        model = adapter_of(tmp_path / "v2", tmp_path / "adapter")
        config = tmp_path / "adapter" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": named}))
        run.publish(folder_files(tmp_path / "adapter"), kind="adapter", base_hash=base_hash)
        return model

    @pytest.mark.parametrize("by", ["hash", "path"])
    def test_merged_logits_are_those_of_peft(self, by, run, tmp_path):
        base_hash = run.head.content_hash if by == "hash" and run.head else ""
        model = self.published(run, tmp_path, "/gone" if by == "hash" else str(tmp_path / "v2"), base_hash)
        done = export_version(run.root, "latest", tmp_path / "out", merge=True)
        assert done.merged and done.version == 3
        assert not any("adapter" in name for name in done.files)
        merged = load_folder(tmp_path / "out")
        torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits(merged), logits(tiny(2)), atol=1e-2)
        assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == TOKENIZER["chat_template.jinja"]
        assert "3 (whole weights)" in (tmp_path / "out" / "README.md").read_text()

    def test_merged_and_converted(self, run, tmp_path):
        self.published(run, tmp_path, str(tmp_path / "v2"))
        export_version(run.root, "latest", tmp_path / "out", merge=True, dtype="bfloat16")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"

    def test_without_merge_it_is_an_adapter_folder(self, run, tmp_path):
        from peft import PeftModel

        model = self.published(run, tmp_path, str(tmp_path / "v2"))
        done = export_version(run.root, "latest", tmp_path / "out")
        assert done.files == ("README.md", "adapter_config.json", "adapter_model.safetensors")
        loaded = PeftModel.from_pretrained(load_folder(tmp_path / "v2"), tmp_path / "out").eval()
        assert torch.equal(logits(loaded), logits(model))
        assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()

    def test_a_base_that_is_not_here_is_named(self, run, tmp_path):
        self.published(run, tmp_path, "org/model")
        with pytest.raises(ConfigError, match="org/model, is no model folder here"):
            export_version(run.root, "latest", tmp_path / "out", merge=True)
        assert not (tmp_path / "out").exists()

    def test_without_peft_the_extra_is_named(self, run, tmp_path, monkeypatch):
        self.published(run, tmp_path, str(tmp_path / "v2"))
        monkeypatch.setitem(__import__("sys").modules, "peft", None)
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[lora\]'"):
            export_version(run.root, "latest", tmp_path / "out", merge=True)


class TestCommand:
    def test_json_says_what_was_written(self, run, tmp_path, monkeypatch, capsys):
        args = (
            "export",
            "lookup",
            "--runs-dir",
            str(tmp_path / "runs"),
            "--out",
            str(tmp_path / "out"),
            "--version",
            "1",
        )
        assert call_main(monkeypatch, *args, "--json") == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["path"] == str(tmp_path / "out") and result["version"] == 1 and result["merged"] is False
        assert result["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
        assert len(result["content_hash"]) == 64

    WRONG = (
        (("--version", "9"), "there are 0, 1, 2", USAGE),
        (("--version", "newest"), "latest", USAGE),
        (("--version", "²"), "--version ²: give a number", USAGE),
        (("--version", "٣"), "give a number", USAGE),
        (("--version", "9" * 5000), "give a number", USAGE),
        (("--version", "best"), "best.json", USAGE),
        (("--dtype", "int8"), "float16", USAGE),
        (("--merge",), "no adapter", USAGE),
        (("--out", "."), "exists", USAGE),
        (("--out", "file/out"), "file is no folder", USAGE),
    )

    @pytest.mark.parametrize(("args", "named", "code"), WRONG, ids=[" ".join(args)[:20] for args, *_ in WRONG])
    def test_wrong_usage_names_what_was_meant(self, args, named, code, run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        assert call_main(monkeypatch, "export", run.root.url, "--out", "out", *args) == code
        assert named in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_run_that_kept_its_registry_in_memory_is_exported_from_a_checkpoint(lookup_model, tmp_path):
    summary, root = run_inprocess(
        small_config(lookup_model, tmp_path / "runs", "learner.steps=1", "learner.checkpoint_every=1")
    )
    done = export_version(root, "latest", tmp_path / "out")
    assert done.version == summary["version"]
    assert not any(name.endswith(".pt") or name == "manifest.json" for name in done.files)
    load_folder(tmp_path / "out")
