"""With `queue.max_lag=0` nothing older than the present weights is trained, and it learns as well."""

import pytest
from command_line import last_json, run

pytestmark = pytest.mark.timeout(600)


def test_it_learns_at_limit_zero(tmp_path):  # case Q12
    code, out, err = run(tmp_path, "train", "lookup", "queue.max_lag=0", "--json", timeout_s=580)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["lag_max_trained"] == 0
    assert summary["success_after"] >= 0.90
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
