"""Files without a name are found wherever a process holds them."""

import subprocess
import sys

import pytest

from headrace.actors.sandboxes.processes import unlinked_bytes

SIZE = 1 << 20
BEGIN = f"""
import ctypes, mmap, os, sys, threading, time
os.chdir(sys.argv[1])
file = os.open("x", os.O_RDWR | os.O_CREAT)
os.write(file, bytes({SIZE}))
os.fsync(file)
def ready():
    print("ready", flush=True)
    time.sleep(600)
"""
MAPPED = f"""
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap(None, ctypes.c_size_t({SIZE}), 3, 1, file, ctypes.c_long(0))
os.close(file)
os.unlink("x")
ready()
"""
OF_A_THREAD = """
os.unlink("x")
def alone():
    time.sleep(0.2)
    ready()
threading.Thread(target=alone).start()
ctypes.CDLL(None).pthread_exit(None)
"""
BOTH = MAPPED.replace("os.close(file)", "")
SHARED = f"""
os.close(file)
os.unlink("x")
shared = mmap.mmap(-1, {SIZE})
shared[:] = bytes({SIZE})
ready()
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [(MAPPED, SIZE), (OF_A_THREAD, SIZE), (BOTH, SIZE), (SHARED, 0)],
    ids=["map", "thread", "both", "shared"],
)
def test_files_without_a_name_are_found_and_counted_once(tmp_path, how, expected):
    argv = [sys.executable, "-c", BEGIN + how, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "ready\n"
            assert expected <= unlinked_bytes([holder.pid]) <= expected * 1.5
        finally:
            holder.kill()
