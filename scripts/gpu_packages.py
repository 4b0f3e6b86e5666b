"""Make a folder of the Python packages that a GPU machine without a package index lacks: one command.

    python scripts/gpu_packages.py [--python 3.12] [--has FILE]

Run it where titanlite is installed and pip works. It installs the packages that titanlite needs, in the versions that
are installed here, into gpu_packages-3.12 beside scripts/: except for torch, its own packages, and those that FILE
names, one per line, as `pip list --format=freeze` writes them there (default: scripts/gpu_image.txt). Copy the folder
with the checkout. scripts/gpu_check.py uses it on a Python of that version.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PLATFORMS = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Versions of glibc of manylinux wheels, the newest first; pip compares them as text."""


def folder_for(python: str) -> Path:
    return REPOSITORY / f"gpu_packages-{python}"


def own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct() -> list[str]:
    """The dependencies of pyproject.toml, without versions."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    return [name_of(requirement) for requirement in requirements]


def name_of(requirement: str) -> str:
    """The name in a line such as "pydantic>=2.10" or "tomli==2.4.1"."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    assert found is not None, requirement
    return canonical(found.group())


def use() -> None:
    """Let this process and those that it starts import the packages of the folder, if there is one.

    Ends the program, with what to type, if packages are missing.
    """
    folder = folder_for(own_python())
    if folder.is_dir():
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    if missing := [name for name in direct() if not is_installed(name)]:
        sys.exit(
            f"{sys.executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}; without a package index "
            f"here, run python scripts/gpu_packages.py --python {own_python()} on a machine with one, and copy "
            f"{folder.name} to {REPOSITORY}"
        )


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def needed(names: Iterable[str], python: str, leave_out: frozenset[str]) -> dict[str, str]:
    """Name -> version here of these packages and of all that they need, without those of `leave_out`, and without what
    only these need."""
    found: dict[str, str] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in leave_out:
            found[name] = metadata.version(name)
            waiting += requirements_of(name, python)
    return dict(sorted(found.items()))


def requirements_of(name: str, python: str) -> Iterator[str]:
    """The packages that a package needs on Linux and this Python, without its extras."""
    from packaging.requirements import Requirement  # absent where only gpu_check.py runs

    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(here):
            yield canonical(requirement.name)


def pip_command(packages: dict[str, str], python: str, folder: Path) -> list[str]:
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    return [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={python}", *platforms, f"--target={folder}", "--upgrade"),
        *(f"{name}=={version}" for name, version in packages.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the Python of the other machine")
    parser.add_argument("--has", default=REPOSITORY / "scripts" / "gpu_image.txt", type=Path, metavar="FILE")
    options = parser.parse_args()
    lines = [line.partition("#")[0].strip() for line in options.has.read_text().splitlines()]
    packages = needed(direct(), options.python, frozenset({"torch", *(name_of(line) for line in lines if line)}))
    folder = folder_for(options.python)
    print(f"{folder}: {', '.join(f'{name} {version}' for name, version in packages.items())}", flush=True)
    subprocess.run(pip_command(packages, options.python, folder), check=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
