"""Training from a folder in Hugging Face format on any mesh, and exports from any mesh."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.gradients import Errors, step_errors
from tests.distributed.program import Starter, rows
from tests.distributed.reference import VOCAB_SIZE, plain_model, small_config
from tests.distributed.resuming import Start, checkpoints_of, numbers, start_runs
from tests.pool import run_ranks
from tests.unit.data.small_hub import COMMIT, SmallHub, small_hub
from titanlite.hf import folder as folder_module
from titanlite.hf import safetensors
from titanlite.hf.folder import ModelFolder, open_folder
from titanlite.hf.safetensors import StoredTensor, write_tensors
from titanlite.models.family import resolve_model
from titanlite.tools.convert.__main__ import main as convert
from titanlite.trainer import Trainer

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tp2": ("parallelism.tp=2",),
    "pp2": ("parallelism.pp=2",),
    "dp_shard2": ("parallelism.dp_shard=2",),
    "replicate2": ("parallelism.dp_replicate=2", "parallelism.dp_shard=1"),
}


def write_initial(folder: Path, *settings: str, dtype: torch.dtype = torch.float64) -> None:
    """Write a model folder with the initial weights of `small_config(1, *settings)`."""
    config = small_config(1, *settings)
    family, hyper_parameters = resolve_model(config.model)
    named = family.hugging_face.names(hyper_parameters)
    parameters = dict(plain_model(config).named_parameters())
    tensors = {named[name]: parameter.detach().to(dtype) for name, parameter in parameters.items()}
    folder.mkdir(parents=True)
    write_tensors(folder / "model.safetensors", tensors)
    fields = {"model_type": family.hugging_face.model_type} | family.hugging_face.config_json(hyper_parameters)
    (folder / "config.json").write_text(json.dumps(fields))


def wrong_slice(out: torch.Tensor, stored: StoredTensor, offset: tuple[int, ...]) -> None:
    """Each rank reads from offset 0."""
    safetensors.read_box_(out, stored, (0,) * len(offset))


def fill(folder: ModelFolder, trainer: Trainer) -> int:
    """Load all parameters, which are NaN before; return the bytes read."""
    read = 0
    for part in trainer.model_parts:
        parameters = {name: parameter.data for name, parameter in part.named_parameters()}
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        read += folder.fill_(parameters)
    return read


def steps_by_layout(path: str) -> list[tuple[str, dict[str, Any], int]]:
    """(name, errors, bytes read by this rank) of one step after the import; then with a planted fault"""
    folder = open_folder("model", Path(path))
    found = []

    def step(name: str, settings: tuple[str, ...]) -> None:
        read: list[int] = []
        errors = step_errors(settings, "uneven", 1, lambda trainer: read.append(fill(folder, trainer)))
        found.append((name, vars(errors), sum(read)))

    for name, settings in LAYOUTS.items():
        step(name, settings)
    with patch.object(folder_module, "read_box_", wrong_slice):
        for name in ("tp2", "dp_shard2"):
            step(f"wrong slice {name}", LAYOUTS[name])
    return found


def test_step_after_an_import_matches_one_process_and_ranks_read_only_their_part(tmp_path: Path) -> None:
    write_initial(tmp_path / "model")
    read: dict[str, list[int]] = {}
    for found in run_ranks(steps_by_layout, 2, str(tmp_path / "model")):
        for name, values, num_bytes in found:
            errors = Errors(**values)
            assert (errors.worst < 1e-12) != name.startswith("wrong slice"), (name, errors)
            read.setdefault(name, []).append(num_bytes)
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
    norms = 5 * 32 * 8  # of two blocks and the final one, replicated over tp
    assert sum(read["tp2"]) == total + norms
    assert sum(read["pp2"]) == sum(read["dp_shard2"]) == total
    assert sum(read["replicate2"]) == 2 * total
    assert max(*read["tp2"], *read["dp_shard2"]) < 0.52 * total
    assert max(read["pp2"]) < 0.6 * total


@contextmanager
def no_folder() -> Iterator[None]:
    """Fail if the imported folder is read."""

    def fail(*_: Any) -> None:
        raise AssertionError("the import is read again")

    with patch.object(folder_module, "read_header", fail), patch.object(folder_module, "read_box_", fail):
        yield


def test_run_starts_from_imported_weights_and_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    """The weights have another seed; optimizer, schedule and data start at step 0; equal on each layout."""
    write_initial(tmp_path / "model", "debug.seed=7")
    write_initial(tmp_path / "infinite")
    tensors = load_file(tmp_path / "infinite/model.safetensors")
    tensors["model.embed_tokens.weight"][-1, -1] = float("inf")  # of a token that does not occur
    save_file(tensors, tmp_path / "infinite/model.safetensors", {"format": "pt"})
    defaults = b'{"eos_token_id": [3, 5]}'
    (tmp_path / "model" / "generation_config.json").write_bytes(defaults)
    path = f"checkpoint.initial_load_path=hf:{tmp_path / 'model'}"
    convert(["import", str(tmp_path / "model"), "--out", str(tmp_path / "imported")])
    step_0 = f"checkpoint.initial_load_path={tmp_path / 'imported' / 'checkpoint'}"
    fresh, one, tp, pp, killed, resumed, full, vocabulary, single, wide, stepped, inside, infinite = start_runs(
        tmp_path,
        [
            Start(("debug.seed=7",), run="fresh"),
            Start((path,), run="one"),
            Start((path, *LAYOUTS["tp2"]), 2, run="tp"),
            Start((path, *LAYOUTS["pp2"]), 2, run="pp"),
            Start((path,), run="killed", kill=(6, 0)),
            Start((path,), run="killed", around=no_folder),
            Start((path, "checkpoint.initial_load_model_only=false"), run="full"),
            Start((path, "model.vocab_size=140", "model.ffn_dim=64"), run="vocabulary"),
            Start((path, "training.dtype=float32"), run="single"),
            Start((path, "model.max_seq_len=64"), run="wide"),
            Start((step_0,), run="stepped"),
            Start(run="imported"),
            Start((f"checkpoint.initial_load_path=hf:{tmp_path / 'infinite'}", *LAYOUTS["tp2"]), 2, run="infinite"),
        ],
    )
    for found in (one, tp, pp, wide, stepped):
        assert (found.error, found.step) == ("", 0)
        weights = {name: value for name, value in found.begin.items() if not name.startswith("stream")}
        assert weights.items() <= fresh.begin.items()  # weights of seed 7 and initial optimizer state
        assert any("in the optimizer" in name for name in weights)
        source = f"hf:{tmp_path / 'model'}, 21 tensors, float64, "
        assert found.logged(f"the weights of {'step 0 in ' if found is stepped else source}")
    assert len({len(found.begin) for found in (one, tp, pp)}) == 1
    found_rows = {name: numbers(tmp_path / name) for name in ("fresh", "one", "tp", "pp", "killed")}
    for name in ("one", "tp", "pp", "killed"):
        assert [row["step"] for row in found_rows[name]] == list(range(1, 9))
        assert [row["lr"] for row in found_rows[name]] == [row["lr"] for row in found_rows["fresh"]]
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in found_rows[name]] == pytest.approx(
                [row[key] for row in found_rows["fresh"]], rel=1e-12
            )
    assert (killed.killed, resumed.error, resumed.step) == (True, "", 4)
    assert resumed.end == one.end
    assert checkpoints_of(one) == ["step-2", "step-4", "step-6", "step-8"]
    assert "checkpoint.initial_load_model_only = False" in full.error
    assert "has no optimizer state and no position in the data" in full.error
    assert "the configuration has 2 problems" in vocabulary.error
    assert f"write vocab_size = {VOCAB_SIZE} in [model], and use the folder's tokenizer" in vocabulary.error
    assert "write ffn_dim = 48 in [model]" in vocabulary.error
    assert "an import holds weights only" in inside.error
    assert 'imported_from"' not in inside.error  # no change that could be accepted
    assert "--checkpoint.initial_load_path FOLDER" in inside.error
    assert "tok_embeddings.weight has NaN or infinite values in torch.float64" in infinite.error
    assert stepped.end == one.end
    for name in ("one", "tp", "pp", "killed", "stepped"):
        assert (tmp_path / name / "checkpoint/step-8/generation_config.json").read_bytes() == defaults
    assert single.logged("21 tensors, converted from float64 to float32")


def test_two_ranks_start_from_the_hub_and_resume_without_it(tmp_path: Path, start: Starter) -> None:
    write_initial(tmp_path / "hub" / "org" / "model")
    local = open_folder("model", tmp_path / "hub" / "org" / "model")
    arguments = ("--checkpoint.enable", "true", "--lr_schedule.decay", "none", "--training.local_batch_size", "4")
    path = ("--checkpoint.initial_load_path", "hf:org/model")

    def train(hub: SmallHub, steps: int, *more: str, ranks: int = 0) -> tuple[int, str]:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_canary"}
        program = start(
            *(tmp_path, *arguments, *path, "--training.steps", str(steps), *more),
            ranks=ranks,
            environment=environment,
            name="output",
        )
        return program.wait(), program.output

    with small_hub(tmp_path / "hub") as hub:
        code, output = train(hub, 2, ranks=2)
        assert code == 0, output
        assert f"with the weights of hf:org/model@{COMMIT}, {len(local.tensors)} tensors, float64" in output
        downloads = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("model.safetensors")]
        assert len(downloads) == 1
        code, output = train(hub, 2, "--model.ffn_dim", "64", "--job.dump_folder", str(tmp_path / "other"), ranks=2)
        assert code != 0
        assert output.count("write ffn_dim = 48 in [model]") == 1
    code, output = train(hub, 4)  # the server is stopped
    assert code == 0, output
    assert "Start: step 2, " in output
    assert [row["step"] for row in rows(tmp_path / "out")] == [1, 2, 3, 4]
    for file in [*(tmp_path / "out").rglob("*"), tmp_path / "output"]:
        assert not file.is_file() or b"hf_canary" not in file.read_bytes()
