"""Check a Python environment, for the shell scripts. The Python of that environment runs this file:

check_environment.py missing [EXTRA …]    the missing dependencies, one per line; nothing if complete
check_environment.py torch-folder         the folder that contains a supported torch; nothing if absent

It does not import torch, so each call takes tenths of a second. Python puts the folder of this file on sys.path, not
the current folder, so a checkout in the current folder does not count as installed.
"""

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[\w+\])?(?P<clauses>(?:[<>]=?[\d.]+,?)*)")


def requirements(extras: list[str]) -> list[str]:
    """The dependencies that pyproject.toml lists, with those of the extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *(name for extra in extras for name in project["optional-dependencies"][extra])]


def fits(version: str, clauses: str) -> bool:
    """Whether a version is a release (no nightly or pre-release) that satisfies clauses such as ">=2.11,<2.16"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?", version)
    if not match:
        return not clauses
    numbers = as_numbers(match[1])
    compare = {">=": numbers.__ge__, "<": numbers.__lt__, ">": numbers.__gt__, "<=": numbers.__le__}
    return all(compare[sign](as_numbers(bound)) for sign, bound in re.findall(r"([<>]=?)([\d.]+)", clauses))


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def lacking(requirement: str) -> str | None:
    """The missing package, or its wrong version; None if this environment meets the requirement."""
    match = REQUIREMENT.fullmatch(requirement.replace(" ", ""))
    if not match:
        raise ValueError(f"pyproject.toml: {requirement!r} is not a name with >=, <=, > or < and numbers")
    name, clauses = match["name"], match["clauses"]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name
    return None if fits(version, clauses) else f"{name} {clauses} (it has {version})"


def missing(extras: list[str]) -> list[str]:
    """The missing dependencies, and "titanlite" if this environment does not import it from this checkout."""
    spec = importlib.util.find_spec("titanlite")
    ours = REPOSITORY / "titanlite" / "__init__.py"
    found_here = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == ours
    lacks = [lacking(requirement) for requirement in requirements(extras)]
    return ([] if found_here else ["titanlite"]) + [lack for lack in lacks if lack]


def torch_folder() -> str:
    """The folder to add to another environment's path to use this environment's torch; "" if it is unsupported."""
    spec = importlib.util.find_spec("torch")
    (torch,) = [requirement for requirement in requirements([]) if requirement.startswith("torch>")]
    return "" if spec is None or spec.origin is None or lacking(torch) else str(Path(spec.origin).parent.parent)


def main(question: str, *arguments: str) -> None:
    match question:
        case "missing":
            print("\n".join(missing(list(arguments))))
        case "torch-folder":
            print(torch_folder())
        case _:
            raise SystemExit(f"unknown question: {question}")


if __name__ == "__main__":
    main(*sys.argv[1:])
