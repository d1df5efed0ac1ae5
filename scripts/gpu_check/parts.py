"""One part, run in this process."""

import traceback
from importlib import import_module

import torch
from transformers.utils import logging as transformers_logging

from .report import Report
from .scale import GPU, REHEARSAL


def run_here(name: str, *, rehearse: bool) -> int:
    """Run the part that the module `name` holds, and tell what it found; the exit status is 0 also where something does
    not hold."""
    transformers_logging.disable_progress_bar()
    if rehearse:
        torch.set_num_threads(1)
    report = Report()
    try:
        import_module(f"{__package__}.{name}").check(REHEARSAL if rehearse else GPU, report)
    except Exception as error:  # the boundary of a part: whatever it is, it is what the part has found
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {error}")
    return 0
