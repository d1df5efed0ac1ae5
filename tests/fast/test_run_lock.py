"""One driver at a time, and a lock that dies with its holder."""

import os
import signal
import subprocess
import sys
import time

import pytest

from headrace.deploy.run_lock import RunLock
from headrace.platform.errors import RunFailed

HOLD = """
import sys, time
from pathlib import Path
from headrace.deploy.run_lock import RunLock
with RunLock(Path(sys.argv[1]), "r"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_driver_is_refused_and_told_who_drives(tmp_path):  # case Q18
    driven = rf"lookup-1 is being driven by process {os.getpid()} on "
    with RunLock(tmp_path, "lookup-1"), pytest.raises(RunFailed, match=driven):
        RunLock(tmp_path, "lookup-1").__enter__()
    with RunLock(tmp_path, "lookup-1"):
        pass


def test_the_lock_of_a_killed_driver_is_free(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(RunFailed, match=f"process {holder.pid} "):
        RunLock(tmp_path, "r").__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    end = time.monotonic() + 5
    while True:
        try:
            with RunLock(tmp_path, "r"):
                return
        except RunFailed:
            assert time.monotonic() < end
