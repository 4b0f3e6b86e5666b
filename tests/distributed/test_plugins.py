"""A run with plugins: on several ranks, resumed, and by the commands that open it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.distributed.program import REPOSITORY, start_command
from titanlite.data.bpe import train_bpe

FAMILY = REPOSITORY / "examples" / "family.py"
CONFIG = """
[job]
plugins = ["family.py", "source.py"]
[model]
family = "primer"
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 2
ffn_dim = 64
vocab_size = 300
[tokenizer]
path = "tokenizer"
[training]
steps = 2
seq_len = 32
local_batch_size = 2
global_batch_size = 4
dtype = "float64"
[metrics]
log_freq = 1
[checkpoint]
enable = true
[data]
num_workers = 1
[[data.sources]]
kind = "notebooks"
path = "."
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a TOML in a subfolder, plugins beside it, a tokenizer and a notebook."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my.toml").write_text(CONFIG)
    for name in ("family", "source"):
        shutil.copy(FAMILY.with_stem(name), tmp_path / "configs")
    cells = [{"source": f"the cell number {number} of a notebook " * 8} for number in range(20)]
    (tmp_path / "all.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "tokenizer").mkdir()
    train_bpe((cell["source"] for cell in cells), 300, tmp_path / "tokenizer")
    return tmp_path


def run(workplace: Path, *arguments: str, program: str = "titanlite.train", ranks: int = 0, code: int = 0) -> str:
    started = start_command(workplace, *arguments, program=("-m", program), ranks=ranks)
    try:
        assert started.wait() == code, started.output
        return started.output
    finally:
        started.close()


@pytest.mark.slow
def test_a_run_with_plugins_resumes_on_another_mesh_and_opens_only_with_permission(workplace: Path) -> None:
    toml = "configs/my.toml"
    output = run(workplace, toml, "--parallelism.tp", "2", ranks=2)
    assert re.search(rf"Plugins: {workplace}/configs/family.py@sha256:\w{{16}}, {workplace}/configs/source.py@", output)
    assert "generate outputs" in output
    assert "--allow-import" in output

    with (workplace / "configs" / "source.py").open("a") as file:
        file.write("# changed\n")
    copy = "outputs/config.toml"
    output = run(workplace, copy, "--training.steps", "3", "--parallelism.tp", "1")
    assert "source.py has changed since its digest was stored" not in output.partition("Changed since")[2]
    assert re.search(r"warning: Plugin: \S+source.py@sha256:\w+ has changed since its digest was stored", output)
    assert re.search(r"Changed since the checkpoint: job.plugins.source.py: \w+ in the checkpoint, \w+ now", output)
    assert re.search(r"^\S+ \S+ 3/3 ", output, re.MULTILINE)

    generate = ("outputs", "--prompt", "the cell", "--max-new-tokens", "3")
    refused = run(workplace, *generate, program="titanlite.tools.generate", code=1)
    names = f"'{workplace}/configs/family.py', '{workplace}/configs/source.py'"
    assert f"needs code that job.plugins of its run names: {names}; to import it, if you trust it, add" in refused
    assert "the cell" in run(workplace, *generate, "--allow-import", program="titanlite.tools.generate")
    evaluate = ("outputs", "--data", "tokenizer/tokenizer.json", "--steps", "1")
    assert "--allow-import" in run(workplace, *evaluate, program="titanlite.tools.evaluate", code=1)
    replay = ("outputs", "--step", "3")
    assert "--allow-import" in run(workplace, *replay, program="titanlite.tools.replay", code=1)
    assert "reproduce" in run(workplace, *replay, "--allow-import", program="titanlite.tools.replay")
    export = ("export", "outputs", "--out", "exported")
    assert "--allow-import" in run(workplace, *export, program="titanlite.tools.convert", code=1)
    refused = run(workplace, *export, "--allow-import", program="titanlite.tools.convert", code=1)
    assert "the family 'primer' has no format for transformers" in refused


@pytest.mark.slow
def test_ranks_with_different_code_are_refused(workplace: Path) -> None:
    """Each rank has a folder of its own, as on nodes without a common file system."""
    for rank in range(2):
        folder = workplace / f"node{rank}"
        shutil.copytree(workplace / "configs", folder)
        with (folder / "family.py").open("a") as file:
            file.write(f"RANK = {rank}\n")
    program = workplace / "own_folder.py"
    program.write_text(
        "import os, runpy, sys\n"
        "sys.argv[1:] = [f'node{os.environ[\"RANK\"]}/my.toml', *sys.argv[1:]]\n"
        "runpy.run_module('titanlite.train', run_name='__main__', alter_sys=True)\n"
    )
    started = start_command(workplace, program=(str(program),), ranks=2)
    try:
        assert started.wait() != 0
        assert re.search(r"rank 1 on .*\n +plugin family.py: sha256 \w+; on rank 0 .*\n$", started.output)
    finally:
        started.close()
