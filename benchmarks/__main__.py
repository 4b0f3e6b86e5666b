"""List the benchmarks: `python -m benchmarks`. Run one: `python -m benchmarks NAME [options]`."""

import ast
import importlib
import inspect
import sys
from functools import wraps
from pathlib import Path

import tyro

from titanlite.ranks.failure import FailureReport
from titanlite.runtime.errors import UsageError


def benchmarks() -> dict[str, str]:
    """Name -> first line of the docstring of each module of this folder with a function `main`, without imports."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main() -> None:
    known = benchmarks()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print("usage: python -m benchmarks NAME [options]; python -m benchmarks NAME --help shows the options\n")
        print("\n".join(f"  {each:{max(map(len, known))}}  {line}" for each, line in known.items()))
        return
    if name not in known:
        raise UsageError(f"unknown benchmark {name!r}: choose one of {', '.join(known)}")
    module = importlib.import_module(f"benchmarks.{name}")

    @wraps(module.main)
    def checked(*args: object, **options: object) -> None:
        given = inspect.signature(module.main).bind(*args, **options).arguments
        for option in ("rounds", "steps"):
            if given.get(option, 1) < 1:
                raise UsageError(f"--{option} {given[option]}: set a positive number")
        if given.get("json") is not None:
            given["json"].mkdir(parents=True, exist_ok=True)  # else an error would come after the measurement
        module.main(**given)

    tyro.cli(checked, prog=f"python -m benchmarks {name}", description=module.__doc__, args=arguments)


if __name__ == "__main__":
    with FailureReport():
        main()
