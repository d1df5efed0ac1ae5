"""Environment variables of a local Ray. Ray reads them when it is imported, so this module does not import it."""

import atexit
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without this Ray listens on every interface of a Linux machine, whatever address it is given.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def keep_ray_local() -> None:
    """Make a Ray that this process starts stay on loopback, report to nobody, and ask for a token of its own.

    To be called before `ray` is imported. What the user has set already stays as it is.
    """
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="headrace-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
