"""Plugins: modules of users that add entries to titanlite's registries when they are imported.

An entry of job.plugins is a module, or a path that ends in .py; titanlite stores it with a digest of its code, as
"my_package.model@sha256:0123456789abcdef". Installed packages offer plugins as entry points.
"""

import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

GROUP = "titanlite.plugins"
"""Entry points of installed packages that are plugins."""

CODE_SUFFIXES = (".py", ".so", ".pyd")
REPLACED = {
    r"'(\w+_STYLES|HEAD_NORMS|WIDE_NORMS|TensorStyle|tensor_styles?)'|decoder_structure\(\) takes": (
        "build the model of the layers of titanlite.models.parts, such as Column and Row, whose types say how tp cuts "
        "them, and call decoder_structure(config)"
    ),
    r"'init'": (
        'write how values begin where the parameter is: roles = {"weight": Role(Init("normal", 0.02))} in the class of '
        "its module, with Role and Init of titanlite.models.parts"
    ),
    r"'(mix|LINEAR|KeyValueCache|style_problems)'": "see the table of replaced names in docs/plugins.md",
    r"'(transfer|transfer_of|parts_of|MATRICES|Transfer|BASE)'": "see the table of replaced names in docs/plugins.md",
}
"""What to write in place of names that earlier versions had, by a pattern of the message of the error."""
MODULE_PREFIX = "titanlite_plugin_"
"""Begins the names of modules of .py files in sys.modules."""


class PluginError(UserError):
    """A plugin cannot be used. entry: of job.plugins. rule, remedy: see Problem."""

    def __init__(self, entry: str, rule: str, remedy: str) -> None:
        self.entry, self.rule, self.remedy = entry, rule, remedy
        super().__init__(f"the plugin {entry!r} must be {rule}; {remedy}")


class RegistrationError(UserError):
    """An entry cannot be registered."""


@dataclass(frozen=True)
class Plugin:
    """An imported plugin. name: of the module, or the absolute path of a .py file. digest: the first 16 digits of the
    SHA-256 of the file, or of all code of the package."""

    name: str
    digest: str

    @property
    def entry(self) -> str:
        """As it is stored in job.plugins."""
        return f"{self.name}@sha256:{self.digest}"

    @property
    def label(self) -> str:
        """The name without the folder, which may differ between machines."""
        return os.path.basename(self.name)


class _State:
    """Process-wide, as the registries are. added: (registry, name, plugin) of all entries by register_... functions."""

    def __init__(self) -> None:
        self.loaded: dict[str, Plugin] = {}
        self.importing = ""
        self.is_fixed = False
        self.added: list[tuple[MutableMapping[str, Any], str, str]] = []


_state = _State()


def load_plugins(entries: Iterable[str]) -> tuple[str, ...]:
    """Import the plugins of installed packages and those of job.plugins, once per process; then fix the registries.

    Returns the entries to store, without plugins that other configurations of this process have named. A file with the
    name and the digest of an imported one is the same plugin, in any folder. A digest that differs from the code's is a
    warning. Raises PluginError.
    """
    installed = _installed(tuple(sys.path))
    found = [
        _load(point.value, f"{point.value} of the installed package {_distribution(point)}") for point in installed
    ]
    for entry in entries:
        name, digest = split_entry(entry)
        plugin = _imported(entry) or _load(os.path.abspath(name) if name.endswith(".py") else name, name)
        if digest not in ("", plugin.digest):
            log.warning("Plugin: %s has changed since its digest was stored (sha256:%s)", plugin.entry, digest)
        found.append(plugin)
    _state.is_fixed = True
    return tuple(dict.fromkeys(plugin.entry for plugin in found))


@cache
def _installed(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of the packages on sys.path. Cached: it reads a file of every installed package."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def loaded_plugins() -> tuple[str, ...]:
    """The entries of all plugins that this process has imported, for the processes that it starts."""
    return tuple(plugin.entry for plugin in _state.loaded.values())


def missing_plugins(entries: Iterable[str]) -> list[str]:
    """The names of plugins that this process has not imported. A file of the same name and code in another folder is
    the same plugin."""
    names = {entry: split_entry(entry)[0] for entry in entries}
    return [name for entry, name in names.items() if name not in _state.loaded and _imported(entry) is None]


def _imported(entry: str) -> Plugin | None:
    """The imported plugin with the digest of an entry, and its name without the folder. Modules of one package have
    the same digest."""
    wanted = Plugin(*split_entry(entry))
    same = (each for each in _state.loaded.values() if (each.label, each.digest) == (wanted.label, wanted.digest))
    return next(same, None)


def is_of_program(registry: MutableMapping[str, Any], name: str) -> bool:
    """Whether this program has registered the entry itself, outside of plugins: processes that it starts lack it."""
    return any(table is registry and known == name and not plugin for table, known, plugin in _state.added)


def is_registered(registry: MutableMapping[str, Any], name: str) -> bool:
    """Whether this program or a plugin has registered the entry, which is not titanlite's own."""
    return any(table is registry and known == name for table, known, _ in _state.added)


def plugin_digests(entries: Iterable[str]) -> dict[str, str]:
    """Plugin, without its folder -> digest, of stored entries."""
    return {Plugin(*split_entry(entry)).label: split_entry(entry)[1] for entry in entries}


def split_entry(entry: str) -> tuple[str, str]:
    """(name, digest) of an entry; the digest is "" if it has none."""
    found = re.fullmatch(r"(.*)@sha256:([0-9a-f]{16})", entry, re.DOTALL)
    return (found[1], found[2]) if found else (entry, "")


def add_entry(registry: MutableMapping[str, Any], name: str, value: Any, function: str) -> None:
    """Add an entry to a registry, on behalf of titanlite.<function>. Raises RegistrationError."""
    if _state.is_fixed and not _state.importing:
        raise RegistrationError(
            f"{function}({name!r}): the registries are fixed since a configuration was read: register before, or in a "
            "module that job.plugins names"
        )
    if name in registry:
        owner = next((plugin for table, known, plugin in _state.added if table is registry and known == name), None)
        whose = "is titanlite's own" if owner is None else f"was registered by {owner or 'this program'}"
        raise RegistrationError(f"{function}({name!r}): this name {whose}: choose another one")
    registry[name] = value
    _state.added.append((registry, name, _state.importing))


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.name


def _load(name: str, shown: str) -> Plugin:
    """Import one plugin, unless this process has imported it. shown: its name in messages."""
    is_file = name.endswith(".py")
    if name in _state.loaded:
        plugin = _state.loaded[name]
        if is_file and _digest_of_file(name, shown) != plugin.digest:
            raise PluginError(shown, "unchanged while this program runs: it was imported before", "start Python again")
        return plugin
    if is_file and os.path.basename(name) in {plugin.label for plugin in _state.loaded.values()}:
        raise PluginError(shown, "a file name that no other plugin has", "rename one of them")
    with _importing(name, shown):
        if is_file:
            plugin = Plugin(name, _import_file(name, shown))
        else:
            module = _import_module(name, shown)
            plugin = Plugin(name, _digest_of_package(module))
    _state.loaded[name] = plugin
    return plugin


@contextmanager
def _importing(name: str, shown: str) -> Iterator[None]:
    """Inside, registrations belong to the plugin `name`. Removes them after an error, which becomes a PluginError."""
    earlier, number = _state.importing, len(_state.added)
    _state.importing = os.path.basename(name)
    try:
        yield
    except PluginError:
        _undo(number)
        raise
    except (Exception, SystemExit) as error:
        _undo(number)
        kind = "" if isinstance(error, RegistrationError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}{_place(error)}".split())
        is_missing = isinstance(error, ModuleNotFoundError)  # a .py file does not find the files beside it
        is_of_names = isinstance(error, TypeError | AttributeError | ImportError | RegistrationError)
        replaced = (new for pattern, new in REPLACED.items() if is_of_names and re.search(pattern, str(error)))
        remedy = (
            "install that module, or add its folder to PYTHONPATH" if is_missing else next(replaced, "fix its code")
        )
        raise PluginError(shown, f"importable: {reason}", remedy) from error
    finally:
        _state.importing = earlier


def _undo(number: int) -> None:
    """Remove all entries after the first `number` ones."""
    for registry, name, _ in _state.added[number:]:
        del registry[name]
    del _state.added[number:]


def _place(error: BaseException) -> str:
    """The line of the plugin that raised the error: " (plug.py, line 3)"."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the place
    own = str(Path(__file__).parents[1]) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(own)), None)
    return "" if last is None else f" ({last.filename}, line {last.lineno})"


class _FileLoader(SourceFileLoader):
    """Runs the given code of the file: that of the digest, and no cached bytecode."""

    def __init__(self, name: str, path: str, code: bytes) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.source_to_code(self._code, self.path)


def _import_file(path: str, shown: str) -> str:
    """Import a .py file; returns its digest, of the bytes that are run."""
    module_name = MODULE_PREFIX + re.sub(r"\W", "_", Path(path).stem)
    try:
        code = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PluginError(shown, f"a readable file ({path}: {reason})", "put it there, or fix the path") from None
    loader = _FileLoader(module_name, path, code)
    spec = spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return code_digest([code])


def _import_module(name: str, shown: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(shown, 'a module, or a path that ends in ".py"', 'write for example "my_package.model"')
    if not {"", os.getcwd()} & set(sys.path):  # as for `python -m`, so that all commands find the same modules
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the plugin needs
        remedy = "install its package, run the command in the folder that has it, or write the path of a .py file"
        raise PluginError(shown, f"a module on Python's path: {error}", remedy) from None


def _digest_of_file(path: str, shown: str) -> str:
    try:
        return code_digest([Path(path).read_bytes()])
    except OSError as error:
        raise PluginError(shown, f"a readable file ({error.strerror})", "put it back, or start Python again") from None


def _digest_of_package(module: ModuleType) -> str:
    """Of the top-level package that has the module: of its code files, with their paths and sizes."""
    top = sys.modules[module.__name__.partition(".")[0]]
    file, folders = getattr(top, "__file__", None), getattr(top, "__path__", None)
    if folders is None:
        return _digest_of_file(file, module.__name__) if file else code_digest([])
    return code_digest(chain.from_iterable(map(_code_of_folder, folders)))


def _code_of_folder(folder: str) -> Iterator[bytes]:
    for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in CODE_SUFFIXES and path.is_file()):
        code = path.read_bytes()
        yield f"{path.relative_to(folder).as_posix()}\0{len(code)}\0".encode() + code


def code_digest(parts: Iterable[bytes]) -> str:
    """The first 16 digits of the SHA-256 of code."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
