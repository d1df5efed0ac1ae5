"""Named places at which a process can be made to die, so that the order of writes is tested and not only believed.

`HEADRACE_FAILPOINTS` names a folder; a file in it that bears a point's name arms the point. Whoever passes it next
takes the file away and is killed as by the kernel: no handler runs, nothing is flushed. So an armed point kills one
process once, whichever of several passes it first. Without the variable a point costs one look-up.
"""

import os
import signal
from pathlib import Path

FOLDER_VARIABLE = "HEADRACE_FAILPOINTS"
FAILPOINTS = (
    "after_blob",  # the learner has staged a version's files
    "after_manifest",  # … has written the manifest, and has not committed
    "after_commit",  # … has committed, and does not know it yet
    "between_shards",  # … has written a part of a checkpoint
    "after_store",  # a worker has stored episodes, and no outbox knows of them
    "after_outbox",  # … has them in the outbox, and has not put them
    "after_put",  # … has put them, and has not taken them out of the outbox
)


def failpoint(name: str) -> None:
    """Die here if the point is armed."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    try:
        Path(folder, name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def arm(folder: Path, name: str) -> None:
    """Arm a point for whoever passes it next. Raises ValueError for a name that no code passes."""
    if name not in FAILPOINTS:
        raise ValueError(f"there is no failpoint {name!r}; there are {', '.join(FAILPOINTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
