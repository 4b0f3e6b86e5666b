"""Starts of other Python processes, in the source: each with -P, so that it imports nothing of its current folder."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def starts(source: str) -> Iterator[list[str]]:
    """The words after sys.executable in each list or tuple of the source that has "-m" or "-c" among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple):
            words = [ast.unparse(each).strip("'") for each in node.elts]
            after = words[words.index("sys.executable") + 1 :] if "sys.executable" in words else []
            if {"-m", "-c"} & {*after}:
                yield after


def test_each_child_is_started_with_safe_imports() -> None:
    found = [(path, words) for path in ROOT.glob("titanlite/**/*.py") for words in starts(path.read_text("utf-8"))]
    assert len(found) >= 3, "workers, runs of a sweep, tasks of tokenize"
    wrong = [f"{path.relative_to(ROOT)}: {words}" for path, words in found if words[0] != "-P"]
    assert wrong == []


def test_each_script_has_safe_imports_for_all_that_it_starts() -> None:
    """slurm.sbatch sources slurm.sh."""
    for script in ("run_train.sh", "titanlite/ranks/slurm.sh"):
        text = (ROOT / script).read_text("utf-8")
        first = re.search(r"^[^#\n]*-m titanlite", text, re.MULTILINE)
        assert first is not None
        assert "\nexport PYTHONSAFEPATH=1\n" in text[: first.start()]


@pytest.mark.parametrize("source", ['[sys.executable, "-m", module]', '(sys.executable, "-u", "-c", text, *words)'])
def test_a_start_without_it_is_found(source: str) -> None:
    (words,) = starts(f"import sys\nf({source})\n")
    assert words[0] != "-P"
