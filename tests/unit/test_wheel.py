"""Test that a wheel, installed into an empty environment outside of the checkout, has all that training needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_wheel(folder: Path) -> Path:
    program = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run(sys.executable, "-c", program, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources: setuptools writes beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "titanlite", folder / "titanlite", ignore=shutil.ignore_patterns("__pycache__"))
    return build_wheel(folder)


@dataclass(frozen=True)
class Environment:
    """An environment that has the wheel, and sees this one's dependencies, but not its titanlite. empty: a folder."""

    folder: Path
    empty: Path

    def install(self, wheel: Path) -> None:
        options = ("--no-deps", "--no-index", wheel)
        run(
            sys.executable, "-m", "pip", "--python", self.folder / "bin" / "python", "install", *options, cwd=self.empty
        )

    def run(self, program: str, *arguments: str) -> str:
        return run(self.folder / "bin" / program, *arguments, cwd=self.empty).stdout


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Environment:
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    found = Environment(tmp_path / "venv", tmp_path / "empty")
    found.empty.mkdir()
    found.install(wheel)
    where = found.run("python", "-c", "import titanlite; print(titanlite.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    return found


def test_the_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    sources = [
        path for path in (ROOT / "titanlite").rglob("*") if path.suffix in (".py", ".toml", ".json", ".sh", ".html")
    ]
    assert sorted(names) == sorted(str(path.relative_to(ROOT)) for path in sources)
    assert "titanlite/configs/quickstart.toml" in names


@pytest.mark.soak  # default suite: the contents of the wheel
def test_the_quick_start_trains_from_the_wheel_in_an_empty_folder(environment: Environment) -> None:
    options = ("--training.steps", "1", "--training.seq_len", "32", "--validation.enable", "false")
    assert " 1/1 " in environment.run("titanlite", "train", "quickstart", *options)
    assert (environment.empty / "outputs" / "quickstart" / "metrics.jsonl").is_file()


PLUGIN = """
from dataclasses import replace

import titanlite
from titanlite.models.llama3 import LLAMA3

titanlite.register_family(replace(LLAMA3, name="my-llama"))
"""
PACKAGE = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "my-models"
version = "1.0"
[project.entry-points."titanlite.plugins"]
llama = "my_models.llama"
[tool.setuptools]
packages = ["my_models"]
"""


@pytest.mark.soak
def test_a_plugin_package_beside_the_wheel_works_in_all_commands(environment: Environment, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "my_models").mkdir(parents=True)
    (package / "pyproject.toml").write_text(PACKAGE)
    (package / "my_models" / "__init__.py").write_text("")
    (package / "my_models" / "llama.py").write_text(PLUGIN)
    environment.install(build_wheel(package))
    model = ("--model.family", "my-llama", "--model.dim", "64", "--model.n_layers", "2", "--model.ffn_dim", "128")
    small = ("--training.steps", "2", "--training.seq_len", "64", "--training.global_batch_size", "4")
    train = ("quickstart", *model, *small, "--training.local_batch_size", "2", "--job.dump_folder", "run")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "titanlite.train")
    output = environment.run("python", *torchrun, *train, "--parallelism.tp", "2", "--checkpoint.enable")
    assert "Plugins: my_models.llama@sha256:" in output
    assert " 2/2 " in output
    output = environment.run("titanlite", "parity", *train, "--layouts", "1x1x1x2", "2x1x1x1")
    assert "all 3 layouts agree with the reference" in output
    assert environment.run("titanlite", "generate", "run", "--prompt", "def", "--max-new-tokens", "4").startswith("def")
    environment.run("titanlite", "convert", "export", "run", "--out", "exported")
    assert (environment.empty / "exported" / "config.json").is_file()
