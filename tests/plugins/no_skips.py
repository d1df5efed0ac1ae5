"""In CI (CI=true) a skipped test is a failed one: a missing server or library must not hide a tier.

tests/conftest.py loads it with `pytest_plugins = ["plugins.no_skips"]`.
"""

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skipped itself."""
    report = yield
    return _failed_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skipped all its tests."""
    report = yield
    return _failed_in_ci(report)


def _failed_in_ci(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\nIn CI nothing is skipped: install what is missing."
    return report
