"""Use a stored run with the commands: digest, export, evaluation, audit, replay, and last the resume.

`python -m tests.golden.use` does so in this process, with the run in the folder `run` of the current folder.
"""

import gc
import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from safetensors.torch import load_file

import titanlite
from tests.distributed.program import rows, start_command
from tests.in_process import TrainingHere
from titanlite.runtime.errors import UserError
from titanlite.tools import digest, evaluate
from titanlite.tools.audit import __main__ as audit
from titanlite.tools.audit.result import read_results
from titanlite.tools.convert import __main__ as convert
from titanlite.tools.replay import __main__ as replay

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs"
LAST = 4
"""The step of the latest checkpoint of a stored run."""
RESULTS = "results.json"


def workplace(name: str, folder: Path) -> Path:
    """Copy a stored run with its configuration and data into `folder`."""
    shutil.copytree(RUNS / name, folder, dirs_exist_ok=True)
    shutil.copy(FOLDER / "tokens.npy", folder)
    return folder


def results_of(folder: Path, module: str = "tests.golden.use") -> Any:
    """What the commands find out about the run in a workplace, in a process of its own: plugins stay registered."""
    start_command(folder, program=("-m", module)).succeed()
    return json.loads((folder / RESULTS).read_text())


def tensors_of(file: Path) -> dict[str, Any]:
    """Dtype, shape and hash of the bytes of each tensor. The safetensors library chooses the order in the file."""
    return {
        name: [str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy())]
        for name, tensor in sorted(load_file(file).items())
    }


def main() -> None:
    gc.collect = lambda *_: 0  # each training would visit all modules twice, of a process that ends soon
    results = {
        "digest": digests(),
        "export": export(),
        "evaluation": evaluation(),
        "audit": audit_of_all(),
        "replay": called(replay.main, "run", "--step", str(LAST), "--allow-import")[0],
        "steps": resumed_steps(),
    }
    Path(RESULTS).write_text(json.dumps(results))


def called(command: Callable[[Sequence[str]], None], *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command, or its error."""
    output, code = io.StringIO(), 0
    try:
        with redirect_stdout(output):
            command(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except UserError as error:
        return 1, str(error)
    print(output.getvalue())
    return code, output.getvalue()


def digests() -> dict[str, str]:
    """The digests of weights, buffers, their average, and the state of the optimizer."""
    code, output = called(digest.main, "run", "--allow-import")
    assert code == 0, output
    return dict(re.findall(r"(\w+) ([0-9a-f]{16})", output))


def export() -> dict[str, Any]:
    """The exported tensors and config.json, or the exit code of a refusal."""
    # transformers, which compares the tokenizers of runs, takes as long to import as all commands together
    with patch.object(convert, "check_tokenizer", lambda *_: None):
        code, error = called(convert.main, "export", "run", "--out", "exported", "--no-verify", "--allow-import")
    if code:
        assert "cannot be exported" in error or "does not have" in error, error
        return {"exit code": code}
    config = json.loads(Path("exported", "config.json").read_text())
    return {"tensors": tensors_of(Path("exported", "model.safetensors")), "config.json": config}


def evaluation() -> dict[str, Any]:
    """Sums and counts of each source of the run's validation."""
    code, output = called(evaluate.main, "run", "--json", "evaluated.json", "--allow-import")
    assert code == 0, output
    counts = ("loss_sum", "num_valid", "num_bytes", "too_long")
    sources = json.loads(Path("evaluated.json").read_text())["sources"]
    return {name: {key: found[key] for key in counts if key in found} for name, found in sources.items()}


def audit_of_all() -> dict[str, Any]:
    """The exit code, and for each interval whether it is reproduced: bit for bit, or within what rounding explains,
    which is measured by three repeats."""
    with patch.object(audit, "start_run", TrainingHere):
        arguments = ("run", "--intervals", "0", "--out", "audited", "--repeats", "3", "--allow-import")
        code, _ = called(audit.main, *arguments)
    intervals = {f"{each.first} to {each.last}": each.is_reproduced for each in read_results(Path("audited"))}
    return {"exit code": code, "reproduced": intervals}


def resumed_steps() -> list[dict[str, float]]:
    """Numbers of the steps after the checkpoint, and of the validation after the last one."""
    titanlite.run("config.toml")
    keys = ("step", "lr", "loss", "grad_norm", "validation/loss")
    return [{key: row[key] for key in keys if key in row} for row in rows(Path("run")) if row["step"] > LAST]


if __name__ == "__main__":
    main()
