"""The code blocks of the pages run, or are checked, as their tags say (CONTRIBUTING.md)."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.documentation.blocks import PAGES, Block, blocks_of, read_page, tag_problem
from tests.documentation.commands import commands, problems_of
from tests.documentation.workplace import PREPARATIONS, Workplace
from tests.unit.conftest import registries  # noqa: F401 a fixture

PAGE = """\
<!-- before: run tokenizer -->
```bash quick
NGPU=2 titanlite generate outputs --prompt "a
b" 2>&1 | tee text && titanlite inspect \\
    my.toml --all  # comment
```
<!-- before: run -->
Text.

- Item:

  ````toml quick
  # my.toml
  [training]
  ````

```
output
```

```bash
false | true
```

```sh quick
```

```python quick soak
```
"""

MANIFEST = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: run}
spec:
  containers:
    - {name: pytorch, image: a, command: [titanlite, train, quickstart], volumeMounts: [{name: a, mountPath: /a}]}
  volumes: [{name: a, emptyDir: {}}]
"""


def with_programs(tag: str) -> list[str]:
    return [page for page in PAGES if any(block.is_program and block.tag == tag for block in read_page(page))]


def run(blocks: Sequence[Block], folder: Path) -> None:
    """Run the blocks, print a line for each, and fail with the output of the first one that fails."""
    for result in Workplace(folder).run_blocks(blocks):
        print(result)
        assert result.exit_code == 0, f"{result}\n{result.output}"


def test_blocks_have_known_tags() -> None:
    blocks = [block for page in PAGES for block in read_page(page)]
    assert [problem for block in blocks if (problem := tag_problem(block))] == []
    assert {name for block in blocks for name in block.before} <= {*PREPARATIONS}


def test_reading_of_blocks() -> None:
    shell, toml, output, *bad = blocks_of("page.md", PAGE)
    assert (shell.line, shell.tag, shell.before) == (2, "quick", ("run", "tokenizer"))
    assert list(commands(shell.text)) == [
        ["titanlite", "generate", "outputs", "--prompt", "a\nb"],
        ["tee", "text"],
        ["titanlite", "inspect", "my.toml", "--all"],
    ]
    assert (toml.file, toml.text, toml.before) == ("my.toml", "# my.toml\n[training]\n", ())
    assert [tag_problem(block) for block in (shell, toml, output)] == ["", "", ""]
    assert [tag_problem(block).partition(": ")[0] for block in bad] == [
        "page.md:21 bash",
        "page.md:25 sh quick",
        "page.md:28 python quick soak",
    ]


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("bash", "titanlite train quickstart --training.step 5", "did you mean training.steps?"),
        ("bash", "cat a | titanlite generate outputs --promt a", "did you mean --prompt?"),
        ("bash", "titanlite generate outputs --prompt a --training.steps 5", "generate takes no --training.steps"),
        ("bash", "titanlite plan quickstart --world-size 8 --training.steps five", "training.steps = 'five'"),
        ("bash", "titanlite pan quickstart", "the commands are train, "),
        ("bash", "titanlite sweep quickstart --optimizer.lr 1e-3,x", "optimizer.lr = 'x'"),
        ("bash", "NGPU=2 ./run_train.sh absent.toml", "a readable TOML file"),
        ("bash", "sbatch --nodes 2 scripts/slurm.sbatch quickstart --modle.dim 5", "did you mean model.dim?"),
        ("bash", "torchrun --nprocs 2 -m titanlite train quickstart", "unrecognized arguments"),
        ("bash", "torchrun --nproc-per-node 2 -m titanlite.train quickstart --trainin.steps 2", "training.steps"),
        ("bash", "if true", "syntax error"),
        ("python", "x = (", "was never closed"),
        ("toml", "[training]\nstep = 5\n", "did you mean training.steps?"),
        ("yaml", "a: b: c", "mapping values"),
        ("yaml", MANIFEST.replace("v1", "v2"), "PyTorchJob: apiVersion must be one of"),
        ("yaml", MANIFEST.replace("name: run", ""), "has no metadata.name"),
        ("yaml", MANIFEST.replace("name: pytorch", "name: main"), "must be named pytorch"),
        ("yaml", MANIFEST.replace("image: a, ", ""), "has no image"),
        ("yaml", MANIFEST.replace("[{name: a, mount", "[{name: b, mount"), "volumeMounts ['b']"),
        ("yaml", MANIFEST.replace("quickstart", "--steps"), "did you mean"),
        ("dockerfile", "FROM a\nCOPI . .", "COPI is no instruction"),
        ("dockerfile", "FROM a\nCMD titanlite", "must be a JSON array"),
        ("dockerfile", "RUN a", "the first instruction must be FROM"),
        ("dockerfile", "FROM a\nRUN a && \\\n    titanlite pan", "the commands are train, "),
    ],
)
def test_mistakes_are_found(
    language: str, text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = problems_of(Block("page.md", 1, language, ("cluster",), text, ()))
    assert problem in found


def test_failures_of_programs_are_found(tmp_path: Path) -> None:
    python, *shells = ("import sys; sys.exit(sys.flags.safe_path + 3)", "false | true", "test -e text", "touch text")
    blocks = [Block("page.md", 1, "bash", ("quick",), text, ()) for text in shells]
    results = Workplace(tmp_path).run_blocks(
        [*blocks, blocks[1], Block("page.md", 2, "python", ("quick",), python, ())]
    )
    assert [result.exit_code for result in results] == [1, 1, 0, 0, 3]


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language for block in read_page(page))])
@pytest.mark.usefixtures("registries")
def test_blocks_are_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace = Workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # modules of plugins are found in the current folder
    found = []
    for block in read_page(page):
        if block.file:
            workplace.write(block.file, block.text)
        found += [f"{block}: {problem}" for problem in problems_of(block)]
    assert found == []


@pytest.mark.parametrize("page", with_programs("quick"))
@pytest.mark.slow
def test_quick_blocks_run(page: str, tmp_path: Path) -> None:
    run([block for block in read_page(page) if block.tag == "quick" or block.file], tmp_path)


@pytest.mark.parametrize("page", with_programs("soak"))
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    run([block for block in read_page(page) if block.tag in ("quick", "soak") or block.file], tmp_path)
