"""Settings of a process that holds very many records."""

import gc


def tune_collector() -> None:
    """Let the cyclic garbage collector run rarely.

    Records are trees outside of the collector's view, so that nearly all it could find are the cycles of finished
    tasks; with thousands of live episodes, looking for them every few hundred allocations costs more than the episodes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
