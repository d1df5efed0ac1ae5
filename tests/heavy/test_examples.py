"""Each example trains: what `headrace train` says after about a minute is well above what it said before."""

from pathlib import Path

import pytest
from command_line import last_json, run

pytestmark = pytest.mark.timeout(600)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# Measured on two busy cores, seeds 0 to 2: reward .54-.57 to .89-.95, tools .44-.51 to .95-.97, environment .30-.38 to
# .97-.99.
@pytest.mark.parametrize(
    ("folder", "below", "above"), [("reward", 0.70, 0.80), ("tools", 0.70, 0.85), ("environment", 0.60, 0.85)]
)
def test_it_trains(folder, below, above, tmp_path):
    recipe = str(EXAMPLES / folder / "recipe.yaml")
    code, out, err = run(tmp_path, "train", recipe, "--json", timeout_s=580)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["score_before"] <= below
    assert summary["score_after"] >= above
    assert summary["score_after"] >= summary["score_before"] + 0.2
    assert summary["equation_holds"] and summary["fates"]["failed"] == 0
