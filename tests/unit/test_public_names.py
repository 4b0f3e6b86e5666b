"""`import titanlite`: its public names, and that it costs nothing."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite

MEASURE = """
import resource
before = resource.getrusage(resource.RUSAGE_SELF)
import titanlite
used = resource.getrusage(resource.RUSAGE_SELF)
import sys
print(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime)
print(*sorted({"torch", "numpy", "tyro", "titanlite.api"} & sys.modules.keys()))
"""
MOST_CPU_S = 0.1


def test_the_import_costs_little() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    assert modules == ""
    assert float(seconds) < MOST_CPU_S


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("titanlite.data.workers", {"torch"}),
        # default suite: distributed/test_launching.py, of an entire run
        pytest.param("titanlite.train", {"datasets", "huggingface_hub", "lm_eval", "yaml"}, marks=pytest.mark.soak),
    ],
)
def test_a_program_starts_without_modules_that_take_seconds(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(bool({absent} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_public_name_is_that_of_a_module() -> None:
    """The import of a module sets the attribute of that name."""
    assert {*titanlite.__all__} & {module.name for module in pkgutil.iter_modules(titanlite.__path__)} == set()


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(Path(titanlite.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imports = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == titanlite._PUBLIC


def test_public_names_have_docstrings() -> None:
    for name in titanlite._PUBLIC:
        assert getattr(titanlite, name).__doc__
        assert name in dir(titanlite)
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = titanlite.rnu
