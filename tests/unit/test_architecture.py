"""Layering rules, checked on the source: imports point down, and only the top layers use the full configuration."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titanlite"

LISTING = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
LAYERS = re.findall(
    r"^  (\w+)(?:\.py|/) ", LISTING[LISTING.index("\ntitanlite/ ") : LISTING.index("\nscripts/ ")], re.MULTILINE
)
"""The folders and files of titanlite/ in CONTRIBUTING's order. Each imports only itself and those listed below it."""
LAYER = {name: len(LAYERS) - place for place, name in enumerate(LAYERS)}
LAYER["__main__"] = len(LAYERS) + 1  # the command table, above all layers
MAX_FILES_OF_TRAINER, MAX_DEPTH_OF_TRAINER, MAX_DEPTH_OF_TRAIN = 24, 8, 18
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "components"}


def part_of(module: str) -> str:
    """The folder or file of titanlite/ that contains a module; "" for titanlite itself."""
    return module.split(".")[1] if "." in module else ""


@cache  # most of the time of these tests is in walks
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def first_party_imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yield the titanlite modules imported anywhere in the tree; for a function or class, the module that has it."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "titanlite":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "titanlite")


def import_violations(module: str, tree: ast.AST, modules: set[str]) -> Iterator[str]:
    part = part_of(module)
    if module == "titanlite":  # its public names are of any layer; it imports them when they are used
        seen = [
            name for node in nodes_of(tree) if is_type_checking(node) for name in first_party_imports(node, modules)
        ]
        imported = first_party_imports(tree, modules)
        yield from (f"imports {name}, not only for type checkers" for name in imported if name not in seen)
        return
    if part and part not in LAYER:
        yield "has no layer: add it to the list of titanlite/ in CONTRIBUTING.md"
        return
    for imported in first_party_imports(tree, modules):
        other = part_of(imported)
        if imported.startswith("."):
            yield f"imports {imported}: relative; write the absolute name"
        elif other not in ("", part) and LAYER.get(other, len(LAYER)) >= LAYER[part]:
            yield f"imports {imported}, which does not lie below it"
        elif part == "models" and other not in ("models", "runtime"):
            yield f"imports {imported}: models/ imports only models/ and runtime/"
    for function in nodes_of(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"imports {name} inside {function.name}" for name in first_party_imports(function, modules))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def name_violations(module: str, tree: ast.AST) -> Iterator[str]:
    if BANNED_NAMES & set(module.split(".")):
        yield "is not named after its subject"
    names = [name for node in nodes_of(tree) for name in names_of(node)]
    if "JobConfig" in names and LAYER[part_of(module)] < LAYER["config"]:
        yield "names JobConfig: take its own section or plain values instead"


def names_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
            return [name]
    return []


def value_violations(module: str, tree: ast.AST) -> Iterator[str]:
    for node in nodes_of(tree):
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=100)) if module != "titanlite.batch":
                yield "has a literal -100: use titanlite.batch.IGNORE_INDEX"
            case ast.Attribute(value=ast.Name(id="pickle"), attr="load" | "loads" as name):
                yield f"uses pickle.{name}"
            case ast.ImportFrom(module="pickle", names=names) if {"load", "loads"} & {alias.name for alias in names}:
                yield "imports load or loads from pickle"
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                yield "has weights_only=False"
            case ast.keyword(arg="trust_remote_code"):
                yield "has trust_remote_code"
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield f"calls {name}"


def torch_violations(module: str, tree: ast.AST) -> Iterator[str]:
    """Private names of torch stand in one place, so that a new torch breaks no other."""
    if module == "titanlite.runtime.torch_internals":
        return
    for node in nodes_of(tree):
        match node:
            case ast.ImportFrom(module=str(path), names=names):
                paths = [f"{path}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                paths = [alias.name for alias in names]
            case ast.Attribute(attr=name) if name.startswith("_"):  # unparsing all attributes takes seconds
                paths = [ast.unparse(node)]
            case _:
                continue
        private = [path for path in paths if re.fullmatch(r"(torch|dist)[\w.]*\._[a-z][\w.]*", path)]
        yield from (f"uses {path}: see torch_internals" for path in private)


PRINTING = {"titanlite.tools.command", "titanlite.tools.config_page", "titanlite.tools.plan.preview"}


def text_violations(module: str, tree: ast.AST) -> Iterator[str]:
    """What commands print may quote files of strangers."""
    if not module.startswith("titanlite.tools.") or module in PRINTING:
        return
    for node in nodes_of(tree):
        match node:
            case ast.Call(func=ast.Name(id="print"), keywords=keywords) if not any(k.arg == "file" for k in keywords):
                yield "calls print: use print_lines or print_text of titanlite.tools.command"


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    tree = tree_of(source)
    found = [*import_violations(module, tree, modules), *name_violations(module, tree), *value_violations(module, tree)]
    found += [*torch_violations(module, tree), *text_violations(module, tree)]
    return [f"{module} {text}" for text in found]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def sources() -> dict[str, str]:
    return {module_of(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_module_breaks_a_rule() -> None:
    found = sources()
    assert len(found) > 20
    problems = [problem for module, source in found.items() for problem in violations(module, source, set(found))]
    assert problems == []


@cache
def imports() -> dict[str, list[str]]:
    """Map each module to the modules that it imports, without empty packages."""
    found = {module: tree_of(source) for module, source in sources().items()}
    empty = {module for module, tree in found.items() if not any(not is_docstring(node) for node in tree.body)}
    return {
        module: [name for name in first_party_imports(tree, set(found)) if name not in empty]
        for module, tree in found.items()
        if module != "titanlite"
    } | {"titanlite": []}  # see import_violations


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest import chain that starts at the module."""
    return (module, *max((longest_chain(name) for name in imports()[module]), key=len, default=()))


def reached(module: str) -> set[str]:
    """All modules loaded by importing the module, except itself."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = set(imports()[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def folder_of(module: str) -> str:
    """titanlite.data.sources.base -> titanlite.data.sources; for a file directly in titanlite/, the file itself."""
    return module.rpartition(".")[0] if module.count(".") > 1 else module


def test_folders_have_no_import_cycle() -> None:
    """Nested folders included."""
    waiting = {folder_of(module): set[str]() for module in imports()}
    for module, names in imports().items():
        waiting[folder_of(module)] |= {folder_of(name) for name in names} - {folder_of(module)}
    while free := [folder for folder, below in waiting.items() if not below & waiting.keys()]:
        for folder in free:
            del waiting[folder]
    assert waiting == {}


def test_import_graph_of_the_trainer_stays_small() -> None:
    """Bound the number of files under the trainer and the longest import chains, which grow unnoticed otherwise."""
    trainer, chain = longest_chain("titanlite.trainer"), longest_chain("titanlite.train")
    files = reached("titanlite.trainer")
    print(f"\n{len(files)} files under titanlite.trainer, {len(trainer)} deep: {' > '.join(trainer)}")
    print(f"{len(reached('titanlite.train'))} files under titanlite.train, {len(chain)} deep: {' > '.join(chain)}")
    assert len(files) <= MAX_FILES_OF_TRAINER, sorted(files)
    assert len(trainer) <= MAX_DEPTH_OF_TRAINER, trainer
    assert len(chain) <= MAX_DEPTH_OF_TRAIN, chain


def test_ignore_index_is_defined_in_batch() -> None:
    assert "IGNORE_INDEX = -100\n" in sources()["titanlite.batch"]


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("titanlite.trainer", "import titanlite.assembly", "imports titanlite.assembly, which does not lie below it"),
        ("titanlite.trainer", "from titanlite import assembly", "imports titanlite.assembly, which does not lie below"),
        ("titanlite.trainer", "from titanlite.config.schema import X", "imports titanlite.config.schema, which does"),
        (
            "titanlite.evaluation.validation",
            "from titanlite.trainer import X",
            "imports titanlite.trainer, which does not",
        ),
        ("titanlite.runtime.logging", "from titanlite.metrics.meter import X", "which does not lie below it"),
        ("titanlite.trainer", "from torch._dynamo import reset", "uses torch._dynamo.reset: see torch_internals"),
        ("titanlite.trainer", "import torch._dynamo.config", "uses torch._dynamo.config: see torch_internals"),
        ("titanlite.trainer", "dist.distributed_c10d._get_default_store()", "uses dist.distributed_c10d._get_default"),
        ("titanlite.assembly.run", "from titanlite.train import main", "which does not lie below it"),
        ("titanlite.data.loader", "from titanlite.tools.tokenize import X", "which does not lie below it"),
        ("titanlite.optim.optimizer", "from titanlite.checkpoint.saver import X", "which does not lie below it"),
        ("titanlite.optim.optimizer", "if TYPE_CHECKING:\n    from titanlite.trainer import X", "which does not lie"),
        ("titanlite.models.layers", "from titanlite.batch import X", "models/ imports only models/ and runtime/"),
        ("titanlite", "from titanlite.api import run", "imports titanlite.api, not only for type checkers"),
        ("titanlite", "def f():\n    import titanlite.api", "imports titanlite.api, not only for type checkers"),
        ("titanlite.train", "def f():\n    from titanlite.trainer import X", "imports titanlite.trainer inside f"),
        ("titanlite.trainer", "from . import loss", "relative"),
        ("titanlite.novelty", "", "has no layer"),
        ("titanlite.optim.optimizer", "def f(config: JobConfig): ...", "names JobConfig"),
        ("titanlite.optim.optimizer", "def f(config: 'JobConfig'): ...", "names JobConfig"),
        ("titanlite.optim.optimizer", "def f(config: schema.JobConfig): ...", "names JobConfig"),
        ("titanlite.optim.utils", "", "is not named after its subject"),
        ("titanlite.data.streams", "labels[0] = -100", "literal -100"),
        ("titanlite.tools.digest", "print(name)", "calls print: use print_lines"),
        ("titanlite.runtime.cache", "pickle.load(file)", "uses pickle.load"),
        ("titanlite.runtime.cache", "from pickle import loads", "from pickle"),
        ("titanlite.runtime.cache", "torch.load(path, weights_only=False)", "weights_only=False"),
        ("titanlite.runtime.cache", "load_dataset(path, trust_remote_code=True)", "trust_remote_code"),
        ("titanlite.runtime.cache", "eval(text)", "calls eval"),
    ],
)
def test_broken_rule_is_reported(module: str, source: str, problem: str) -> None:
    (found,) = violations(module, source, set(sources()))
    assert found.startswith(f"{module} ")
    assert problem in found
