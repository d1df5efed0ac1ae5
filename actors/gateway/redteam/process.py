"""A gateway process for attacks: the real one, but for its ways out, which lead to `outside.py`.

`HOME/outside.json` says where that listens, and what else the process finds in its environment.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.gateway import process

if TYPE_CHECKING:
    from headrace.actors.gateway.perform.connector import Ways

SETTING = "outside.json"
TRIED = "tried.log"


def main(argv: Sequence[str]) -> int:
    """See `process.main`; the first argument is the home."""
    home = Path(argv[0])
    setting = json.loads((home / SETTING).read_text(encoding="utf-8"))
    os.environ.update(setting["env"])

    def ways() -> "Ways":
        from headrace.actors.gateway.redteam.ways_out import RecordedWays, keep_on_loopback

        def tell(tried: str) -> None:
            with (home / TRIED).open("a", encoding="utf-8") as log:
                log.write(f"{tried}\n")

        keep_on_loopback(tell)
        recorded = RecordedWays(setting["address"])
        return recorded, recorded.resolve

    return process.main(argv, ways)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
