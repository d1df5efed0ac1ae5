"""Where this node keeps what it can have again: trained stages, copies of versions, sandboxes."""

from pathlib import Path


def node_cache() -> Path:
    """The folder; it may not exist yet."""
    return Path.home() / ".cache" / "headrace"
