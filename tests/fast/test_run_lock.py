"""One driver at a time, and a lock that dies with its holder."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from headrace.deploy.run_lock import RunClaim, RunLock
from headrace.platform.errors import RunFailed

HOLD = """
import sys, time
from pathlib import Path
from headrace.deploy.run_lock import RunClaim, RunLock
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


class TestClaims:
    """Drivers on different hosts meet in the run root alone (case Q18)."""

    @pytest.fixture
    def root(self):
        url = f"memory://claims-{os.urandom(4).hex()}/run"
        yield url
        fsspec.filesystem("memory").rm(url.rsplit("/", 1)[0], recursive=True)

    def test_a_second_driver_is_refused_while_the_first_is_heard_of(self, root):
        now = [1000.0]
        with RunClaim(root, "lookup-1", lambda: now[0]):
            now[0] += 29.0
            with pytest.raises(RunFailed, match=rf"driven by process {os.getpid()} on .*, last heard of 29 s ago"):
                RunClaim(root, "lookup-1", lambda: now[0]).__enter__()

    def test_what_is_given_back_or_no_longer_renewed_is_free(self, root):
        now = [1000.0]
        with RunClaim(root, "r", lambda: now[0]):
            pass
        claim = RunClaim(root, "r", lambda: now[0], term_s=600.0)
        claim.__enter__()  # dies here: never released
        now[0] += 31.0
        with RunClaim(root, "r", lambda: now[0]):
            pass
        claim.__exit__(None, None, None)

    def test_on_its_own_host_a_dead_holder_is_known_to_be_dead(self, root):
        holder = subprocess.Popen([sys.executable, "-c", "pass"])
        holder.wait()
        fs, path = fsspec.core.url_to_fs(root)
        told = {"pid": holder.pid, "host": socket.gethostname(), "renewed_s": time.time(), "released": False}
        fs.pipe_file(f"{path}/driver/000000.json", json.dumps(told).encode())
        with RunClaim(root, "r"):
            pass
        fs.pipe_file(f"{path}/driver/000002.json", json.dumps({**told, "host": "elsewhere"}).encode())
        with pytest.raises(RunFailed, match=f"process {holder.pid} on elsewhere"):
            RunClaim(root, "r").__enter__()

    def test_of_two_at_once_one_wins(self, root):
        won, lost = [], []

        def drive():
            claim = RunClaim(root, "r")
            try:
                claim.__enter__()
            except RunFailed as error:
                lost.append(str(error))
            else:
                won.append(claim)

        drivers = [threading.Thread(target=drive) for _ in range(6)]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
        assert (len(won), len(lost)) == (1, 5)
        won[0].__exit__(None, None, None)

    def test_a_holder_that_lives_is_heard_of(self, root):
        with RunClaim(root, "r", term_s=0.3):
            time.sleep(0.5)  # longer than the term: only renewals keep the claim
            with pytest.raises(RunFailed, match="being driven"):
                RunClaim(root, "r", term_s=0.3).__enter__()
