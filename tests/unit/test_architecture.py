"""The rules that hold the parts apart, read off the source: imports point down, the configuration stays at the top."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titanlite"

# A module's layer is that of its longest prefix here. It imports its own layer and those above it in this table only.
LAYERS = [
    ["titanlite", "titanlite.runtime", "titanlite.batch", "titanlite.precision"],
    [
        *["titanlite.models", "titanlite.data", "titanlite.optim", "titanlite.loss"],
        *[f"titanlite.parallel{part}" for part in ("", ".mesh", ".tensor", ".data", ".recompute", ".clip")],
    ],
    [
        *["titanlite.parallel.parallelize", "titanlite.parallel.pipeline"],
        *["titanlite.checkpoint", "titanlite.metrics", "titanlite.hf"],
    ],
    ["titanlite.forward", "titanlite.trainer", "titanlite.validation"],
    ["titanlite.assembly", "titanlite.config", "titanlite.tools.saved_run"],
    [
        *[
            "titanlite.train",
            "titanlite.summary",
            "titanlite.tools.parity",
            "titanlite.tools.plan",
            "titanlite.tools.document",
        ],
        *["titanlite.tools.command", "titanlite.tools.tokenize", "titanlite.tools.train_tokenizer"],
        "titanlite.tools.inspect",
        *["titanlite.tools.convert", "titanlite.tools.generate", "titanlite.tools.evaluate"],
    ],
]
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}
ASSEMBLY = LAYER["titanlite.assembly"]
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "components"}


def layer_of(module: str) -> int | None:
    """None where the table has no place for the module."""
    prefixes = [module.rsplit(".", cut)[0] for cut in range(module.count("."))]
    return next((LAYER[prefix] for prefix in prefixes if prefix in LAYER), LAYER.get(module))


def first_party_imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Names of the modules of titanlite that are imported anywhere in the tree, as far down as they are modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "titanlite":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "titanlite")


def import_violations(module: str, tree: ast.AST, modules: set[str]) -> Iterator[str]:
    layer = layer_of(module)
    if layer is None:
        yield "has no layer: give it one in the table of this test"
        return
    for imported in first_party_imports(tree, modules):
        below = layer_of(imported)
        if imported.startswith("."):
            yield f"imports {imported}: relative, write the whole name"
        elif below is None or below > layer:
            yield f"imports {imported}, which lies above it"
        elif module.startswith("titanlite.models") and not imported.startswith(
            ("titanlite.models", "titanlite.runtime")
        ):
            yield f"imports {imported}: models know models/ and runtime/ only"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"imports {name} inside {function.name}" for name in first_party_imports(function, modules))


def name_violations(module: str, tree: ast.AST) -> Iterator[str]:
    if BANNED_NAMES & set(module.split(".")):
        yield "is not named after its subject"
    names = [name for node in ast.walk(tree) for name in names_of(node)]
    if "JobConfig" in names and (layer_of(module) or 0) < ASSEMBLY:
        yield "names JobConfig: it takes its own section or plain values"


def names_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
            return [name]
    return []


def value_violations(module: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=100)) if module != "titanlite.batch":
                yield "has a literal -100: it is titanlite.batch.IGNORE_INDEX"
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


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    tree = ast.parse(source)
    found = [
        *import_violations(module, tree, modules),
        *name_violations(module, tree),
        *value_violations(module, tree),
    ]
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


def test_ignore_index_is_defined_in_batch() -> None:
    assert "IGNORE_INDEX = -100\n" in sources()["titanlite.batch"]


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("titanlite.trainer", "import titanlite.assembly", "imports titanlite.assembly, which lies above it"),
        ("titanlite.trainer", "from titanlite import build", "imports titanlite.assembly, which lies above it"),
        (
            "titanlite.trainer",
            "from titanlite.config.schema import X",
            "imports titanlite.config.schema, which lies above",
        ),
        ("titanlite.runtime.logging", "from titanlite.metrics.meter import X", "which lies above it"),
        ("titanlite.parallel.data", "from titanlite.parallel.parallelize import X", "which lies above it"),
        ("titanlite.assembly", "from titanlite.train import main", "which lies above it"),
        ("titanlite.data.loader", "from titanlite.tools.tokenize import X", "which lies above it"),
        ("titanlite.optim.optimizer", "if TYPE_CHECKING:\n    from titanlite.trainer import X", "which lies above it"),
        ("titanlite.models.layers", "from titanlite.data.loader import X", "models know models/ and runtime/ only"),
        ("titanlite.train", "def f():\n    from titanlite.loss import X", "imports titanlite.loss inside f"),
        ("titanlite.trainer", "from . import loss", "relative"),
        ("titanlite.novelty", "", "has no layer"),
        ("titanlite.optim.optimizer", "def f(config: JobConfig): ...", "names JobConfig"),
        ("titanlite.optim.optimizer", "def f(config: 'JobConfig'): ...", "names JobConfig"),
        ("titanlite.optim.optimizer", "def f(config: schema.JobConfig): ...", "names JobConfig"),
        ("titanlite.optim.utils", "", "is not named after its subject"),
        ("titanlite.data.streams", "labels[0] = -100", "literal -100"),
        ("titanlite.data.cache", "pickle.load(file)", "uses pickle.load"),
        ("titanlite.data.cache", "from pickle import loads", "from pickle"),
        ("titanlite.data.cache", "torch.load(path, weights_only=False)", "weights_only=False"),
        ("titanlite.data.cache", "load_dataset(path, trust_remote_code=True)", "trust_remote_code"),
        ("titanlite.data.cache", "eval(text)", "calls eval"),
    ],
)
def test_broken_rule_is_found(module: str, source: str, problem: str) -> None:
    (found,) = violations(module, source, set(sources()))
    assert found.startswith(f"{module} ")
    assert problem in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titanlite.train", "from titanlite.assembly.run import build_run\nconfig: JobConfig"),
        ("titanlite.config.check", "from titanlite.trainer import check_training"),
        ("titanlite.tools.tokenize", "from titanlite.config.load import parse_config"),
        ("titanlite.models.llama3.model", "from titanlite.models.layers import X\nmodel.eval()"),
        ("titanlite.batch", "IGNORE_INDEX = -100"),
        ("titanlite.metrics.sinks", "def f():\n    import tensorboard"),
        ("titanlite.data.cache", "torch.load(path, weights_only=True)"),
    ],
)
def test_kept_rules_are_not_found(module: str, source: str) -> None:
    assert violations(module, source, set(sources())) == []
