"""Which modules count as code that must be equal on all ranks."""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from titanlite.assembly.facts import code_facts


def test_modules_that_python_imports_by_itself_count_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As facts that no rank may lack, unlike other modules."""
    installed = tmp_path / "site-packages"
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(installed) if name == "purelib" else get_path(name))
    for folder, name in (
        (installed, "usercustomize"),
        (tmp_path, "sitecustomize"),
        (tmp_path, "own"),
        (installed, "b"),
    ):
        folder.mkdir(exist_ok=True)
        module = ModuleType(name)
        module.__file__ = str(folder / f"{name}.py")
        Path(module.__file__).write_text(name)
        monkeypatch.setitem(sys.modules, name, module)
    facts = code_facts({})
    assert {"usercustomize", "sitecustomize", "module own"} <= facts.keys()
    assert not {"module usercustomize", "module sitecustomize", "module b"} & facts.keys()
