"""scripts/test_pythons.sh with stub Pythons, and the supported versions that the project files state."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.unit.test_scripts import PYTHON, REPOSITORY, Checkout, executable

SCRIPT = "scripts/test_pythons.sh"
TESTED = ["3.11", "3.12", "3.13"]


def stub(version: str) -> str:
    """A stub Python of this version, whose pytest fails if STUB_FAILS is the version."""
    cases = f"""case "$*" in
*sys.executable*) echo "{version} $0" ;;
*platform.python_version*) echo "{version}.5 torch 2.13.0" ;;
*"-m pytest"*) echo "7 tests in 1.50s" && [[ ${{STUB_FAILS-}} != {version} ]] ;;
*"""
    return PYTHON.replace('case "$*" in\n*', cases, 1).replace("|| echo 3.11", f"|| echo {version}")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout with python3.11 and python3.13 as the only Pythons on PATH."""
    checkout = Checkout(tmp_path)
    for name in ("head", "mktemp", "tail", "tee"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "tools" / name).symlink_to(found)
    (checkout.bin / "python3").unlink()
    for version in ("3.11", "3.13"):
        executable(checkout.bin / f"python{version}", stub(version))
    return checkout


def summary(output: str) -> list[str]:
    """The summary lines at the end, without the seconds."""
    return [re.sub(r" \d+ s:", ":", line) for line in f"\n{output}".rpartition("\n\n")[2].splitlines()]


PASSED = "{0}.5 torch 2.13.0 passed: 7 tests in 1.50s"


def pytest_calls(checkout: Checkout) -> list[tuple[str, str]]:
    """(Python, arguments from the selection of tests on) of each pytest call."""
    calls = [call.partition(" -m pytest ") for call in checkout.calls().splitlines() if " -m pytest " in call]
    return [(python, arguments[arguments.index("-m not slow") :]) for python, _, arguments in calls]


def test_each_found_python_runs_the_quick_size(checkout: Checkout) -> None:
    done = checkout.run(script=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert summary(done.stdout) == [PASSED.format("3.11"), "3.12: not found", PASSED.format("3.13")]
    assert pytest_calls(checkout) == [(f"{checkout.bin}/python", "-m not slow")] * 2
    assert not list(checkout.repo.glob(".venv*"))


def test_incomplete_pythons_get_an_environment_each_and_reuse_it(checkout: Checkout) -> None:
    checkout.python_is(missing="torch")
    done = checkout.run(script=SCRIPT)
    assert done.returncode == 0, done.stderr
    venvs = [checkout.repo / f".venv-{version}" for version in ("3.11", "3.13")]
    assert sorted(checkout.repo.glob(".venv*")) == venvs
    assert pytest_calls(checkout) == [(f"{venv}/bin/python", "-m not slow") for venv in venvs]
    assert done.stderr.count("creating .venv-3.1") == 2
    calls = checkout.calls()
    again = checkout.run(script=SCRIPT)
    assert summary(again.stdout) == summary(done.stdout)
    assert "pip install" in calls
    assert "pip install" not in checkout.calls().removeprefix(calls)


@pytest.mark.parametrize("failing", ["3.11", "3.13"])
def test_a_failing_python_fails_the_script_after_all_have_run(checkout: Checkout, failing: str) -> None:
    done = checkout.run(script=SCRIPT, STUB_FAILS=failing)
    assert done.returncode == 1
    first, _, last = summary(done.stdout)
    expected = [PASSED.format(version) for version in ("3.11", "3.13")]
    expected[failing == "3.13"] = expected[failing == "3.13"].replace("passed", "FAILED")
    assert [first, last] == expected


def test_failed_set_up_fails_the_script(checkout: Checkout) -> None:
    checkout.python_is(missing="torch")
    (checkout.log.parent / "log.no-pip").touch()
    done = checkout.run(script=SCRIPT)
    assert done.returncode == 1
    assert summary(done.stdout) == ["3.11 FAILED: no environment", "3.12: not found", "3.13 FAILED: no environment"]
    assert pytest_calls(checkout) == []


def test_named_pythons_and_arguments_of_pytest(checkout: Checkout) -> None:
    other = executable(checkout.cwd / "other" / "python", stub("3.14"))
    done = checkout.run("3.13", str(other), "--", "tests/unit", "-k", "a b", script=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert summary(done.stdout) == [PASSED.format("3.13"), PASSED.format("3.14")]
    assert pytest_calls(checkout) == [
        (f"{folder}/python", "-m not slow tests/unit -k a b") for folder in (checkout.bin, other.parent)
    ]


def test_named_python_must_exist(checkout: Checkout) -> None:
    done = checkout.run("3.13", "3.12", "no/python", script=SCRIPT)
    assert done.returncode == 1
    assert summary(done.stdout) == [PASSED.format("3.13"), "3.12: not found", "no/python: not found"]


def test_no_python_at_all_is_an_error(checkout: Checkout) -> None:
    for python in checkout.bin.glob("python*"):
        python.unlink()
    done = checkout.run(script=SCRIPT)
    assert done.returncode == 1
    assert done.stderr.startswith("test_pythons.sh: found none of 3.11 3.12 3.13: name the ones to test")


def test_pyenv_and_active_pythons_are_found(checkout: Checkout) -> None:
    shim = "#!/usr/bin/env bash\necho pyenv: command not found >&2\nexit 127\n"
    executable(checkout.bin / "python3.12", shim)
    pyenv = checkout.log.parent / "pyenv"
    executable(pyenv / "versions" / "3.12.5" / "bin" / "python", stub("3.12"))
    (checkout.bin / "python3.13").rename(checkout.bin / "python3")
    done = checkout.run(script=SCRIPT, PYENV_ROOT=str(pyenv))
    assert done.returncode == 0, done.stderr
    assert summary(done.stdout) == [PASSED.format(version) for version in TESTED]


def test_stated_pythons_agree() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    assert [name.rpartition(" ")[2] for name in project["classifiers"] if name.startswith(prefix)] == TESTED
    assert project["requires-python"] == f">={TESTED[0]}"
    assert f"tested=({' '.join(TESTED)})" in (REPOSITORY / "scripts" / "environment.sh").read_text()
    assert f"Python 3.{TESTED[0][2:]} to 3.{TESTED[-1][2:]};" in " ".join(
        (REPOSITORY / "README.md").read_text().split()
    )


def test_untested_python_is_used_with_a_warning(checkout: Checkout) -> None:
    executable(checkout.bin / "python3", stub("3.14"))
    checkout.python_is(missing="torch")
    remark = "Python 3.14 is untested: if it fails, delete .venv and set PYTHON to one of 3.11 3.12 3.13"
    (checkout.log.parent / "log.no-pip").touch()
    assert checkout.refused(script="scripts/test.sh").endswith(f": fix it, and start again. {remark}")
    (checkout.log.parent / "log.no-pip").unlink()
    done = checkout.run(script="scripts/test.sh")
    assert done.returncode == 0
    assert done.stderr.splitlines()[1:] == [f"test.sh: {remark}"]
    assert checkout.run(script="scripts/test.sh").stderr == ""
