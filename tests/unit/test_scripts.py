"""The shell scripts, with stubs of python and pip, in a checkout whose path contains a space."""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from subprocess import PIPE
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTED = ["3.11", "3.12", "3.13", "3.14"]
TOOLS = ["bash", "cat", "chmod", "cp", "dirname", "env", "flock", "getconf", "grep", "mkdir", "nproc", "readlink", "rm"]

# A Python that logs its calls. Files next to it set its state: version, missing, gpus, torch-folder, no-venv
PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$here/python $*" >>"$STUB_LOG"
case "$*" in
*-venv*version_info*) echo python3.11-venv ;;
*version_info*) cat "$here/version" 2>/dev/null || echo 3.11 ;;
*"check_environment.py missing"*) cat "$here/missing" 2>/dev/null || true ;;
*"check_environment.py torch-folder"*) cat "$here/torch-folder" 2>/dev/null || true ;;
*"import venv, ensurepip"*) [[ ! -e $here/no-venv ]] ;;
*"-m venv --clear"*)
    rm -rf "$5" && mkdir -p "$5/bin" || exit
    cp "$0" "$5/bin/python"
    echo everything >"$5/bin/missing" ;;
*sysconfig*) echo "$here" ;;
*"-m pip install"*)
    pwd >>"$STUB_LOG"
    [[ ! -e $STUB_LOG.no-pip ]] && rm -f "$here/missing" ;;
*"-m pytest"*) echo "pytest in $PWD, OMP_NUM_THREADS=$OMP_NUM_THREADS" ;;
*"-m titanlite.torchrun.launcher"*)
    echo "$0"
    shift 2
    printf '%s\\n' "$@"
    echo "in $PWD"
    for name in PYTHONSAFEPATH CUDA_VISIBLE_DEVICES TITANLITE_RUN_TRAIN; do echo "$name=${!name-unset}"; done ;;
esac
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Checkout:
    """A checkout with the real scripts, and a PATH of stubs and a few system tools only."""

    def __init__(self, folder: Path) -> None:
        self.repo = folder / "a checkout"
        self.bin = folder / "bin"
        self.cwd = folder / "elsewhere"
        self.log = folder / "log"
        self.venv = self.repo / ".venv"
        self.cwd.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.repo / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("run_train.sh", ".ci/run"):
            (self.repo / name).parent.mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / name, self.repo / name)
        for name in TOOLS:
            if (found := shutil.which(name)) is not None:
                (folder / "tools").mkdir(exist_ok=True)
                (folder / "tools" / name).symlink_to(found)
        executable(self.bin / "python3", PYTHON)
        self.environment = {"PATH": f"{self.bin}:{folder / 'tools'}", "STUB_LOG": str(self.log)}

    def python_is(self, **facts: str) -> None:
        for name, text in facts.items():
            (self.bin / name.replace("_", "-")).write_text(text)

    def run(self, *arguments: str, script: str = "run_train.sh", **variables: str) -> subprocess.CompletedProcess[str]:
        command = [self.repo / script, *arguments]
        environment = self.environment | variables
        return subprocess.run(command, cwd=self.cwd, env=environment, capture_output=True, text=True, timeout=60)

    def launched(self, *arguments: str, **variables: str) -> list[str]:
        """Return the start of the launcher: its Python, its arguments, the working folder, then the variables."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def refused(self, *arguments: str, script: str = "run_train.sh", **variables: str) -> str:
        """Return the error message of a script that exits before it starts anything."""
        done = self.run(*arguments, script=script, **variables)
        assert done.returncode == 1
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert lines[-1].startswith(f"{Path(script).name}: ")
        return lines[-1]

    def calls(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_complete_active_python_runs_the_launcher_without_set_up(checkout: Checkout) -> None:
    lines = checkout.launched("--training.steps", "50", "--job.description", "two words")
    config = str(checkout.repo / "configs" / "quickstart.toml")
    assert lines == [
        *[str(checkout.bin / "python3"), "--", "--job.config_file", config],
        *["--training.steps", "50", "--job.description", "two words"],
        *[f"in {checkout.cwd}", "PYTHONSAFEPATH=1", "CUDA_VISIBLE_DEVICES=unset"],
        f"TITANLITE_RUN_TRAIN={checkout.repo / 'run_train.sh'}",
    ]
    assert not checkout.venv.exists()


@pytest.mark.parametrize("command", [["./run_train.sh"], ["bash", "run_train.sh"], ["elsewhere/go"]])
def test_the_run_knows_how_the_script_was_called(checkout: Checkout, command: list[str]) -> None:
    (checkout.repo / "elsewhere").mkdir()
    (checkout.repo / "elsewhere" / "go").symlink_to(checkout.repo / "run_train.sh")
    done = subprocess.run(
        command, cwd=checkout.repo, env=checkout.environment, capture_output=True, text=True, timeout=60
    )
    assert str(checkout.repo / "configs" / "quickstart.toml") in done.stdout
    shown = command[-1] if "/" in command[-1] else "./run_train.sh"
    assert done.stdout.splitlines()[-1] == f"TITANLITE_RUN_TRAIN={shown}"


@pytest.mark.parametrize(
    "own", [["--job.config_file", "own.toml"], ["--job.config_file=own.toml"], ["own.toml", "--training.steps", "5"]]
)
def test_config_file_by_variable_and_by_command_line(checkout: Checkout, own: list[str]) -> None:
    assert checkout.launched(CONFIG_FILE="my run.toml")[1:4] == ["--", "--job.config_file", "my run.toml"]
    lines = checkout.launched(*own, CONFIG_FILE="other.toml")
    assert lines[1 : 2 + len(own)] == ["--", *own]
    assert "other.toml" not in lines


STATIC = {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "a:1", "NGPU": "1"}
ELASTIC = {"NNODES": "1:4", "RDZV_ENDPOINT": "a:1", "MAX_RESTARTS": "7", "NGPU": "1"}


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        (STATIC, "--nnodes=2 --node-rank=1 --rdzv-backend=static --rdzv-endpoint=a:1"),
        ({"NNODES": "1", "NODE_RANK": "0"}, ""),
        (ELASTIC, "--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=a:1 --rdzv-id=a:1 --max-restarts=7"),
    ],
)
def test_nodes(checkout: Checkout, variables: dict[str, str], arguments: str) -> None:
    """Also a number of nodes that may change."""
    lines = checkout.launched(**variables)
    assert lines[1 : lines.index("--")] == arguments.split()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NGPU": "two"}, "NGPU=two"),
        ({"NGPU": "0"}, "NGPU=0"),
        ({"NNODES": "1:4"}, "RDZV_ENDPOINT=: must be host:port of the node that is never lost"),
        ({"NNODES": "1:x"}, "NNODES=1:x: must be MIN:MAX"),
        ({"NNODES": "4:4", "RDZV_ENDPOINT": "a:1"}, "MIN must be below MAX; for a fixed number of nodes, NNODES=4"),
        ({"NNODES": "1:4", "NODE_RANK": "0", "RDZV_ENDPOINT": "a:1"}, "NODE_RANK=0: must not be set with NNODES=1:4"),
        ({"NNODES": "1:4", "RDZV_ENDPOINT": "a:1", "MAX_RESTARTS": "x"}, "MAX_RESTARTS=x"),
        ({"NNODES": "2"}, "NODE_RANK (the rank of this node, 0 to 1) and RDZV_ENDPOINT"),
        ({"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "a:1"}, "NODE_RANK=2"),
        ({"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "a"}, "RDZV_ENDPOINT=a: must be host:port"),
        ({"DEVICE": "tpu"}, "DEVICE=tpu: must be cpu, cuda, or not set"),
    ],
)
def test_bad_variables_are_refused_before_any_set_up(checkout: Checkout, variables: dict[str, str], words: str) -> None:
    done = checkout.run(**variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.startswith("titanlite: ")
    assert checkout.calls() == ""


def test_device(checkout: Checkout) -> None:
    assert "CUDA_VISIBLE_DEVICES=" in checkout.launched(DEVICE="cpu")
    assert "CUDA_VISIBLE_DEVICES=unset" in checkout.launched(DEVICE="cuda")


def test_python_too_old_or_missing(checkout: Checkout) -> None:
    for version in ("2.7", "3.10"):
        checkout.python_is(version=version)
        assert f"Python 3.11 or newer is needed, but python3 is Python {version}" in checkout.refused()
    (checkout.bin / "python3").unlink()
    assert "nothing runs as python3 or python:" in checkout.refused()
    assert "nothing runs as /no/python:" in checkout.refused(PYTHON="/no/python")
    assert not checkout.venv.exists()


def test_set_up_runs_once_and_prints_one_line(checkout: Checkout) -> None:
    checkout.python_is(missing="titanlite\ntorch")
    done = checkout.run("--training.steps", "1")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "lacks titanlite, torch: creating .venv" in done.stderr
    assert f"pip install -e '{checkout.repo}'" in done.stderr
    assert done.stdout.startswith(f"{checkout.venv / 'bin' / 'python'}\n")
    calls = checkout.calls()
    install = "-P -m pip install --disable-pip-version-check --constraint scripts/constraints.txt --editable .[report]"
    assert f"{checkout.venv}/bin/python {install}\n{checkout.repo}\n" in calls
    assert not (checkout.repo / ".venv.incomplete").exists()
    again = checkout.run()
    assert again.stderr == ""
    assert "pip install" not in checkout.calls().removeprefix(calls)


def test_interrupted_set_up_is_repeated(checkout: Checkout) -> None:
    checkout.python_is(missing="torch")
    (checkout.log.parent / "log.no-pip").touch()
    assert "pip could not install titanlite" in checkout.refused()
    assert (checkout.repo / ".venv.incomplete").exists()
    (checkout.log.parent / "log.no-pip").unlink()
    (checkout.venv / "half").touch()
    (checkout.venv / "bin" / "missing").unlink()  # a partial installation may look complete
    assert checkout.run().returncode == 0
    assert not (checkout.venv / "half").exists()
    assert not (checkout.repo / ".venv.incomplete").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="the system has no flock")
def test_second_concurrent_start_waits_for_the_first(checkout: Checkout) -> None:
    checkout.python_is(missing="torch")
    lock = os.open(checkout.repo, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        second = subprocess.Popen(
            [checkout.repo / "run_train.sh"], env=checkout.environment, stdout=PIPE, stderr=PIPE, text=True
        )
        assert second.stderr is not None
        assert "another process is setting up .venv" in second.stderr.readline()
        executable(checkout.venv / "bin" / "python", PYTHON)
    finally:
        os.close(lock)
    output, errors = second.communicate(timeout=60)
    assert "quickstart.toml" in output
    assert errors == ""
    assert "pip install" not in checkout.calls()


def test_users_own_venv_is_completed_and_never_cleared(checkout: Checkout) -> None:
    checkout.python_is(missing="torch")
    executable(checkout.venv / "bin" / "python", PYTHON)
    (checkout.venv / "bin" / "missing").write_text("tyro")
    (checkout.venv / "bin" / "torch-folder").write_text("its own")
    done = checkout.run()
    assert "completing .venv" in done.stderr
    assert "-m venv" not in checkout.calls()
    assert "-P -m pip install --disable-pip-version-check --editable .[report]" in checkout.calls()  # its torch stays
    (checkout.venv / "bin" / "python").unlink()
    assert "has no working Python: delete it" in checkout.refused()


def test_installed_torch_is_kept(checkout: Checkout) -> None:
    checkout.python_is(missing="tyro", torch_folder="/site with torch")
    assert "keeping the torch in /site with torch" in checkout.run().stderr
    assert (checkout.venv / "bin" / "torch_folder.pth").read_text() == "/site with torch\n"


def test_missing_venv_module_names_the_package(checkout: Checkout) -> None:
    checkout.python_is(missing="torch", no_venv="")
    assert "apt install python3.11-venv" in checkout.refused()
    assert not (checkout.repo / ".venv.incomplete").exists()


def test_test_script(checkout: Checkout) -> None:
    done = checkout.run("-m", "not slow", script="scripts/test.sh")
    assert done.stdout == f"pytest in {checkout.repo}, OMP_NUM_THREADS=1\n"
    assert re.search(r"-m pytest -n logical .*-m not slow$", checkout.calls(), re.MULTILINE)
    assert "check_environment.py missing test\n" in checkout.calls()


def test_ci_lints_checks_types_builds_the_site_then_calls_the_test_script(checkout: Checkout) -> None:
    done = checkout.run(script=".ci/run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pytest in ")
    calls = [call.split("python ", 1)[1] for call in checkout.calls().splitlines() if " -m " in call]
    site = "-m sphinx --quiet --fail-on-warning --keep-going -c docs -b html . site"
    assert calls[:-1] == ["-m ruff check .", "-m ruff format --check .", "-m mypy", site]
    assert calls[-1].startswith("-m pytest ")


def test_quick_start_of_the_readme_names_the_test_script_that_ci_runs() -> None:
    script = (REPOSITORY / ".ci/run").read_text().splitlines()[-1].removeprefix("exec ")
    readme = (REPOSITORY / "README.md").read_text()
    assert script == "./scripts/test.sh"
    assert f"`{script}`" in readme.partition("\n## Quick start\n")[2].partition("\n## ")[0]


def test_stated_pythons_agree() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    assert [name.rpartition(" ")[2] for name in project["classifiers"] if name.startswith(prefix)] == TESTED
    assert project["requires-python"] == f">={TESTED[0]}"
    script = (REPOSITORY / "scripts" / "environment.sh").read_text()
    assert f"tested=({' '.join(TESTED)})" in script
    assert f"Python {TESTED[0]} or newer is needed" in script
    assert f"Python {TESTED[0]} to {TESTED[-1]};" in " ".join((REPOSITORY / "README.md").read_text().split())


def test_untested_python_is_used_with_a_warning(checkout: Checkout) -> None:
    checkout.python_is(version="3.15", missing="torch")
    remark = "Python 3.15 is untested: if it fails, delete .venv and set PYTHON to one of 3.11 3.12 3.13 3.14"
    (checkout.log.parent / "log.no-pip").touch()
    assert checkout.refused(script="scripts/test.sh").endswith(f": fix it, and start again. {remark}")
    (checkout.log.parent / "log.no-pip").unlink()
    done = checkout.run(script="scripts/test.sh")
    assert done.returncode == 0
    assert done.stderr.splitlines()[1:] == [f"test.sh: {remark}"]
    assert checkout.run(script="scripts/test.sh").stderr == ""


def test_a_python_has_its_own_environment(checkout: Checkout) -> None:
    other = executable(checkout.cwd / "other" / "python3", PYTHON)
    assert checkout.launched(PYTHON="other/python3")[0] == str(other)
    (other.parent / "missing").write_text("torch")
    for creates in (True, False):
        done = checkout.run(script="scripts/test.sh", PYTHON=str(other), VENV=".venv-3.12")
        assert done.returncode == 0
        assert ("creating .venv-3.12" in done.stderr) is creates
    assert f"{checkout.cwd}/.venv-3.12/bin/python -m pytest" in checkout.calls()
    assert not checkout.venv.exists()


# check_environment.py


def load_check_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_environment", REPOSITORY / "scripts" / "check_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_environment = load_check_environment()


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        *[(version, True) for version in ("2.11", "2.11.0", "2.13.1+cu130", "2.12.0.post1", "2.15.0")],
        *[
            (version, False)
            for version in ("2.10.9", "2.16", "2.16.0+cpu", "3.0", "2.13.0.dev20260101", "2.12.0a0+git")
        ],
    ],
)
def test_version_range_excludes_nightlies(version: str, fits: bool) -> None:
    assert check_environment.fits(version, ">=2.11,<2.16") is fits


def test_every_requirement_can_be_checked() -> None:
    extras = list(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for requirement in check_environment.requirements(extras):
        check_environment.lacking(requirement)
    assert check_environment.lacking("no-such-distribution>=1") == "no-such-distribution"
    assert check_environment.lacking("pytest<1").startswith("pytest <1 (it has ")
    with pytest.raises(ValueError, match="is not a name with"):
        check_environment.lacking("a; python_version < '3.12'")


def test_current_folder_does_not_count_as_installed(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    command = [tmp_path / "bin" / "python", REPOSITORY / "scripts" / "check_environment.py", "missing"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def lacks(**variables: str) -> list[str]:
        return subprocess.check_output(command, cwd=REPOSITORY, env=clean | variables, text=True).split("\n")

    assert lacks()[:2] == ["titanlite", "torch"]
    assert lacks(PYTHONPATH=str(REPOSITORY))[:1] == ["torch"]
    executable(tmp_path / "another" / "titanlite" / "__init__.py", "")
    assert lacks(PYTHONPATH=str(tmp_path / "another"))[:2] == ["titanlite", "torch"]


@pytest.mark.soak
def test_fresh_clone_sets_itself_up(tmp_path: Path) -> None:
    """The README's commands in a new clone, with network access and a Python without packages."""
    repo = tmp_path / "a clone"
    subprocess.run(["git", "clone", "-q", REPOSITORY, repo], check=True)
    path = f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for expected in ("creating .venv", ""):
        done = subprocess.run(
            [repo / "run_train.sh", "--help"], cwd=tmp_path, env=clean | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stderr if expected else done.stderr == ""
        assert "--training.steps" in done.stdout
