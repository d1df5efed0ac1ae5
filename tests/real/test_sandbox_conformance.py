"""Every kind of box, over both suites; the limits are small so that they are reached."""

import shutil

import msgspec
import pytest
from box_kinds import PROTECTING, provider

from headrace.actors.sandboxes.process import ProcessProvider
from headrace.actors.sandboxes.script import shell_argv
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.testing.conformance.sandbox import SANDBOX_SUITE
from headrace.platform.testing.conformance.sandbox_shell import SHELL_SUITE, SMALL

KINDS = (*PROTECTING, "unsafe-process")
SUITE = SANDBOX_SUITE | SHELL_SUITE
LIMITS = msgspec.to_builtins(SMALL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUITE)
async def test_the_kind_conforms(kind, name, tmp_path, request):
    if kind == "docker":
        request.getfixturevalue("docker_host")
    await SUITE[name](lambda: provider(kind, tmp_path / "state", **LIMITS))
    left = [path for path in (tmp_path / "state").rglob("*") if path.exists()]
    assert not left, "a closed provider left files"


class OtherShell(ProcessProvider):
    """Plain processes whose shell is not bash."""

    shell = ()

    def argv(self, folder):
        return [*self.shell, *shell_argv("sh", host=True)[1:]]


@pytest.mark.parametrize("shell", ["dash", "busybox"])
@pytest.mark.parametrize("name", SUITE)
async def test_the_plainest_shells_do(shell, name, tmp_path):
    path = shutil.which(shell)
    assert path, f"scripts/system.sh installs {shell}"
    kind = type("Kind", (OtherShell,), {"shell": (path, "sh") if shell == "busybox" else (path,)})
    await SUITE[name](lambda: kind(SandboxConfig(mode="unsafe-process", **LIMITS), tmp_path / "state"))
