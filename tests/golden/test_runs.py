"""Ten stored runs: each command gives the recorded results, with the code of this version.

Each run is exported, evaluated, audited, replayed and resumed on one process, also if it was trained on two: see
tests/golden/use.py. record.py trained them; CONTRIBUTING.md says when one is recorded again.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.record import RECIPES
from tests.golden.use import RUNS, results_of, workplace

MOST_BYTES = 3 * 2**20
"""Of all files together."""
FLOAT32 = 1e-6
"""Relative, of the run with bit_equal, which needs float32: other processors round by up to 6e-8 in each operation."""
FLOAT64 = 1e-12
"""Bitwise equal on the original processor. Others round differently in float64; wrong numerics differ far more."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, texts and truth values of nested results, by their paths."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, value


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_command_gives_the_recorded_results(name: str, tmp_path: Path) -> None:
    require_recorded(name, results_of(workplace(name, tmp_path)))


@pytest.mark.slow
def test_a_run_keeps_the_values_that_its_flavor_had(tmp_path: Path) -> None:
    """Loss coefficient, norms and initial weights come from the flavor; all commands take the checkpoint's values."""
    require_recorded("latent_attention", results_of(workplace("latent_attention", tmp_path), "tests.golden.later"))


def require_recorded(name: str, results: Any) -> None:
    """Require the results that are recorded for a stored run."""
    expected = dict(leaves(json.loads((RUNS / name / "expected.json").read_text())))
    found = dict(leaves(results))
    assert found.keys() == expected.keys()
    rounded = {path for path, value in expected.items() if isinstance(value, float)}
    assert {path: found[path] for path in found if path not in rounded} == {
        path: expected[path] for path in expected if path not in rounded
    }
    bound = FLOAT32 if name == "bit_equal" else FLOAT64
    assert {path: found[path] for path in rounded} == pytest.approx(
        {path: expected[path] for path in rounded}, rel=bound, abs=0
    )


def test_the_runs_are_small_and_do_not_name_the_machine_that_trained_them() -> None:
    files = [file for file in RUNS.rglob("*") if file.is_file()]
    assert {file.relative_to(RUNS).parts[0] for file in files} == {*RECIPES}
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    saved = [file for file in files if file.suffix in (".toml", ".json", ".jsonl", ".npz")]
    assert len(saved) > 4 * len(RECIPES)
    for file in saved:
        absolute = re.findall(rb'"/[\w.]+/[^"]*"', file.read_bytes())
        hosts = {*re.findall(rb'"(?:hosts|slowest_host)": "([^"]*)"', file.read_bytes())}
        assert not absolute, file
        assert hosts <= {b"host"}, file
