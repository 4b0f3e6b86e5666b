import hashlib
import sys
from pathlib import Path

import pytest

from titanlite.optim.schedule import DECAY_SHAPES
from titanlite.runtime import plugins
from titanlite.runtime.plugins import (
    PluginError,
    RegistrationError,
    add_entry,
    load_plugins,
    loaded_plugins,
    missing_plugins,
    plugin_digests,
    split_entry,
)

pytestmark = pytest.mark.usefixtures("registries")

CODE = "import titanlite\ntitanlite.register_schedule({name!r}, lambda progress: progress)\n"


@pytest.fixture
def plug(tmp_path: Path) -> Path:
    path = tmp_path / "plug.py"
    path.write_text(CODE.format(name="mine"))
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a plugin, on Python's path."""
    name = f"package_of_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / "site" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(CODE.format(name="packaged"))
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_a_file_is_imported_once_and_stored_with_its_path_and_digest(plug: Path) -> None:
    digest = hashlib.sha256(plug.read_bytes()).hexdigest()[:16]
    entries = load_plugins([str(plug)])
    assert entries == (f"{plug}@sha256:{digest}",)
    assert "mine" in DECAY_SHAPES
    assert load_plugins([str(plug)]) == load_plugins(entries) == loaded_plugins() == entries
    assert plugin_digests(entries) == {"plug.py": digest}
    assert split_entry(str(plug)) == (str(plug), "")


def test_a_relative_path_becomes_absolute(plug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plug.parent)
    assert load_plugins(["plug.py"])[0].startswith(f"{plug}@sha256:")


def test_the_digest_of_a_module_is_that_of_all_code_of_its_package(package: Path) -> None:
    entry = f"{package.name}.model"
    (first,) = load_plugins([entry])
    assert first.startswith(f"{entry}@sha256:")
    (package / "notes.txt").write_text("no code")
    assert plugins._digest_of_package(sys.modules[entry]) == split_entry(first)[1]
    (package / "other.py").write_text("x = 1\n")
    assert plugins._digest_of_package(sys.modules[entry]) != split_entry(first)[1]


def test_a_module_of_the_current_folder_is_found(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(package.parent))])
    with pytest.raises(PluginError, match="No module named"):
        load_plugins([f"{package.name}.model"])
    monkeypatch.chdir(package.parent)
    load_plugins([f"{package.name}.model"])


def test_another_digest_is_a_warning(plug: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_plugins([f"{plug}@sha256:0123456789abcdef"])
    assert "has changed since its digest was stored (sha256:0123456789abcdef)" in caplog.text


def test_the_same_code_elsewhere_is_the_same_plugin(plug: Path) -> None:
    (entry,) = load_plugins([str(plug)])
    moved = entry.replace(str(plug), "/elsewhere/plug.py")
    assert missing_plugins([moved, "/elsewhere/plug.py"]) == ["/elsewhere/plug.py"]
    assert load_plugins([moved]) == (entry,)


def test_two_modules_of_a_package_are_two_plugins_of_one_digest(package: Path) -> None:
    (package / "data.py").write_text(CODE.format(name="second"))
    entries = load_plugins([f"{package.name}.model", f"{package.name}.data"])
    assert len({split_entry(entry)[1] for entry in entries}) == 1
    for name in ("packaged", "second"):
        del DECAY_SHAPES[name]
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]
    plugins._state = plugins._State()  # as in a process that gets the stored entries
    assert missing_plugins(entries) == [f"{package.name}.model", f"{package.name}.data"]
    load_plugins(entries[:1])
    assert missing_plugins(entries) == [f"{package.name}.data"]
    assert load_plugins(entries) == entries
    assert {"packaged", "second"} <= DECAY_SHAPES.keys()


def test_plugins_of_another_configuration_are_not_stored(plug: Path, package: Path) -> None:
    load_plugins([str(plug)])
    (entry,) = load_plugins([f"{package.name}.model"])
    assert entry.startswith(package.name)
    assert load_plugins([]) == ()
    assert len(loaded_plugins()) == 2


def test_a_file_that_changes_while_the_program_runs_is_refused(plug: Path) -> None:
    (entry,) = load_plugins([str(plug)])
    plug.write_text("")
    assert load_plugins([entry]) == (entry,)  # of a run with the code that was imported
    with pytest.raises(PluginError, match="start Python again"):
        load_plugins([str(plug)])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1 / 0", r"ZeroDivisionError: division by zero \(\S+plug.py, line 3\)"),
        ("if x", r"SyntaxError: expected ':' \(plug.py, line 3\)"),
        ("import not_there", r"No module named 'not_there' \(\S+plug.py, line 3\); install that module, or add"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(\S+plug.py, line 3\)"),
        ("from titanlite.models.decoder import TENSOR_STYLES", "; build the model of the layers of titanlite.models"),
        ("from titanlite.models.decoder import init", r"; write how values begin where the parameter is: roles = "),
        (
            "from titanlite.models.llama3 import *; LLAMA3.variant('own', None, init=None)",
            "; write how values begin where the param",
        ),
        (
            "from titanlite.models.decoder import *; decoder_structure(None, {})",
            r"; build the model .* call decoder_structure\(config\)",
        ),
        (
            "from titanlite.models.linear_attention import *; GatedDeltaNet.mix",
            "; see the table of replaced names in docs/plugins.md",
        ),
        (CODE.format(name="cosine"), r"importable: register_schedule\('cosine'\): this name is titanlite's own"),
        (CODE.format(name="first"), r"register_schedule\('first'\): this name was registered by plug.py"),
    ],
)
def test_an_error_of_a_plugin_is_one_line_and_leaves_no_entry(plug: Path, code: str, reason: str) -> None:
    before = dict(DECAY_SHAPES)
    plug.write_text(CODE.format(name="first") + code)
    with pytest.raises(PluginError, match=reason):
        load_plugins([str(plug)])
    assert before == DECAY_SHAPES
    plug.write_text(CODE.format(name="first"))
    load_plugins([str(plug)])  # a second attempt is not confused by the first


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("nowhere.py", "no such file or directory"),
        ("not_there.model", "No module named 'not_there'"),
        ("no module", "a module, or a path that ends in"),
        ("", "a module, or a path that ends in"),
    ],
)
def test_an_entry_without_code_is_named(entry: str, reason: str) -> None:
    with pytest.raises(PluginError, match=reason) as raised:
        load_plugins([entry])
    assert raised.value.entry == entry


def test_two_files_of_one_name_are_refused(plug: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plug.py").write_text("")
    with pytest.raises(PluginError, match="a file name that no other plugin has"):
        load_plugins([str(plug), str(tmp_path / "other" / "plug.py")])


def test_an_installed_package_offers_a_plugin(package: Path) -> None:
    information = package.parent / "offering-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[titanlite.plugins]\nmine = {package.name}.model\n")
    (entry,) = load_plugins([])
    assert entry.startswith(f"{package.name}.model@sha256:")
    assert "packaged" in DECAY_SHAPES
    assert load_plugins([f"{package.name}.model"]) == (entry,)


def test_a_broken_plugin_of_an_installed_package_names_the_package(package: Path) -> None:
    information = package.parent / "offering-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[titanlite.plugins]\nmine = not_there\n")
    with pytest.raises(PluginError, match="not_there of the installed package offering"):
        load_plugins([])


def test_the_registries_are_fixed_after_a_configuration_was_read() -> None:
    table: dict[str, int] = {}
    add_entry(table, "early", 1, "register_schedule")
    load_plugins([])
    with pytest.raises(RegistrationError, match=r"register_schedule\('late'\): the registries are fixed"):
        add_entry(table, "late", 1, "register_schedule")
    assert table == {"early": 1}
