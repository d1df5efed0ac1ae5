"""Landlock's boxes where the kernel has it, and the refusal where it has not: the kernel decides, not the product."""

import sys

import psutil
import pytest
from box_kinds import LANDLOCK_NEEDED, landlock_abi, provider

from headrace.actors.sandboxes.landlock import why_not

LIMIT_S = 20.0


def test_the_kernel_decides():
    abi = landlock_abi()
    if abi >= LANDLOCK_NEEDED:
        assert why_not() == ""
    else:
        assert ("no Landlock" if abi < 1 else f"ABI {abi}") in why_not()


@pytest.mark.parametrize(("abi", "says"), [(-1, "no Landlock"), (3, "ABI 3")])
def test_an_older_kernel_is_refused(abi, says, monkeypatch):
    monkeypatch.setattr("sandlock.landlock_abi_version", lambda: abi)
    assert says in why_not()


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sandlock", None)
    assert "pip install sandlock" in why_not()


async def test_daemons_end_with_the_command_that_was_killed(tmp_path):
    """They fall to the supervisor, not to the shell; those of earlier commands go on."""
    if landlock_abi() < LANDLOCK_NEEDED:
        assert why_not(), "a kernel without it is refused; there is no box to look at"
        return
    one = provider("landlock", tmp_path)
    box = await one.create()
    daemon = "perl -e 'exit if fork; setpgrp; exit if fork; exec @ARGV' sleep"
    await box.run(f"{daemon} 7001.5", LIMIT_S)
    assert (await box.run(f"{daemon} 7002.5; sleep 60", 1.5)).limit == "time"
    assert not running("7002.5") and running("7001.5")
    await one.close()
    assert not running("7001.5")


def running(argument):
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line for line in found if argument in line]
