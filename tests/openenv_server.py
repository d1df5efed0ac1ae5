"""A stock OpenEnv server with a small environment, as a process: `python openenv_server.py PORT_FILE [CAPACITY]`.

It shows a word, and wants it said back: the reward is the share of letters that are right, each in its place. Written
with nothing but `openenv-core`, so that the other side of our client is not our own. `serving` starts it for a test.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

LETTERS = "abcd"


@contextlib.contextmanager
def serving(folder, capacity=16, deadline_s=90.0):
    """The server's address as `ws://…`, as long as the block lasts."""
    file = Path(folder) / "port"
    with (Path(folder) / "openenv.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(file), str(capacity)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            ends = time.monotonic() + deadline_s
            while not file.exists():
                if process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"the OpenEnv server did not start: {Path(log.name).read_text()[-3000:]}")
                time.sleep(0.1)
            yield f"ws://127.0.0.1:{file.read_text()}"
        finally:
            process.kill()
            process.wait()


def main(port_file, capacity):
    """Serve on a free port of loopback, and write its number into a file once it can be used."""
    import socket

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    from openenv.core.env_server.types import EnvironmentMetadata

    class Said(Action):
        message: str

    class Shown(Observation):
        word: str
        turn: int = 0

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State()
            self._word = ""

        def reset(self, seed=None, episode_id=None, **kwargs):
            dice = random.Random(seed)
            self._word = "".join(dice.choice(LETTERS) for _ in range(dice.randint(1, 4)))
            self._state = State(episode_id=episode_id, step_count=0)
            return Shown(word=self._word)

        def step(self, action, timeout_s=None, **kwargs):
            if action.message == "raise":
                raise ValueError("the world broke")
            self._state.step_count += 1
            pairs = zip(action.message, self._word, strict=False)
            right = sum(said == shown for said, shown in pairs)
            reward = right / max(len(action.message), len(self._word))
            return Shown(word=self._word, turn=self._state.step_count, reward=reward, done=True)

        @property
        def state(self):
            return self._state

        def get_metadata(self):
            return EnvironmentMetadata(name="echo", description="Say what is shown.", version="0.7")

    app = create_fastapi_app(Echo, Said, Shown, max_concurrent_envs=int(capacity))
    listening = socket.create_server(("127.0.0.1", 0))

    def tell():
        fresh = Path(f"{port_file}.new")
        fresh.write_text(str(listening.getsockname()[1]))
        fresh.replace(port_file)

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            tell()

    Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
