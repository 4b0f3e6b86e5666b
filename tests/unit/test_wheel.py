"""Test that a wheel, installed into an empty environment outside of the checkout, has all that training needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources: setuptools writes beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "titanlite", folder / "titanlite", ignore=shutil.ignore_patterns("__pycache__"))
    program = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run(sys.executable, "-c", program, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    sources = [path for path in (ROOT / "titanlite").rglob("*") if path.suffix in (".py", ".toml", ".json")]
    assert sorted(names) == sorted(str(path.relative_to(ROOT)) for path in sources)
    assert "titanlite/configs/quickstart.toml" in names


def test_the_quick_start_trains_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The environment sees this one's dependencies, but not its titanlite."""
    venv.create(tmp_path / "venv", symlinks=True)
    binaries, empty = tmp_path / "venv" / "bin", tmp_path / "empty"
    empty.mkdir()
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ("pip", "--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", *install, cwd=empty)
    options = ("--training.steps", "1", "--training.seq_len", "32", "--validation.enable", "false")
    where = run(binaries / "python", "-c", "import titanlite; print(titanlite.__file__)", cwd=empty)
    assert Path(where.stdout.strip()).is_relative_to(site)
    done = run(binaries / "titanlite", "train", "quickstart", *options, cwd=empty)
    assert " 1/1 " in done.stdout
    assert (empty / "outputs" / "quickstart" / "metrics.jsonl").is_file()
