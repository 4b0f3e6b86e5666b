"""examples/notebook.ipynb and docs/python.md, without Jupyter: their code is executed with fewer steps."""

import json
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import titanlite

pytestmark = pytest.mark.usefixtures("one_collection")

ROOT = Path(__file__).parents[2]
NOTEBOOK, PAGE = ROOT / "examples" / "notebook.ipynb", ROOT / "docs" / "python.md"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_shows_a_training_and_a_text() -> None:
    assert [cell["execution_count"] for cell in CELLS] == [1, 2, 3, 4]
    shown = ["".join(output.get("text", output.get("data", {}).get("text/plain"))) for output in outputs()]
    assert "60/60" in shown[0]
    assert not any(word in text for text in shown for word in ("Error", "/root", "/tmp"))
    lines = [line for cell in CELLS[:2] for line in "".join(cell["source"]).splitlines() if line]
    assert len(lines) <= 10


def outputs() -> list[dict[str, Any]]:
    return [output for cell in CELLS for output in cell["outputs"]]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library of 40 files, which has a validation split, and an empty working folder."""
    folder, get_paths = tmp_path / "lib", sysconfig.get_paths
    folder.mkdir()
    for n in range(40):
        (folder / f"module{n}.py").write_text(f"# module {n}: the words of a text\nvalue = {n}\n" * 10)

    def paths(*scheme: Any, **options: Any) -> dict[str, str]:
        return get_paths(*scheme, **options) | ({} if scheme or options else {"stdlib": str(folder)})

    monkeypatch.setattr(sysconfig, "get_paths", paths)
    monkeypatch.chdir(tmp_path)


def execute(sources: Iterable[str]) -> dict[str, Any]:
    """Execute the sources in one namespace, with two steps each."""
    namespace: dict[str, Any] = {}
    for source in sources:
        exec(compile(re.sub(r'("training.steps": )\d+', r"\g<1>2", source), "example", "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_the_cells_run(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = execute("".join(cell["source"]) for cell in CELLS)
    assert (namespace["run"].step, namespace["run"].folder) == (2, Path("outputs/notebook"))
    assert namespace["evaluation"].step == 2
    assert " 2/2 " in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.usefixtures("library")
def test_the_programs_of_the_documentation_run() -> None:
    programs = re.findall(r"^```python soak\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    namespace = execute(programs)
    assert namespace["run"].folder == Path("outputs/lr-0.003")
    assert Path("outputs/python-exported/config.json").is_file()


def test_the_documentation_has_all_names() -> None:
    table = PAGE.read_text("utf-8")
    missing = [name for name in titanlite.__all__ if f"`{name}" not in table and not name.startswith("register_")]
    assert missing == ["__version__"]
