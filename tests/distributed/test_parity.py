"""`python -m titanlite parity`: output, errors and exit codes. test_mistakes.py tests the comparison."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.layouts import EXPERTS
from tests.distributed.mistakes import averaging_reduction, changed
from tests.distributed.program import CONFIG, REPOSITORY, clean_environment, start_command
from tests.distributed.reference import small_config
from tests.distributed.test_float8 import small_blocks
from titanlite.batch import Batch
from titanlite.models import float8, init
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.float8 import Float8, ProductName, float8_product
from titanlite.models.layers import RMSNorm
from titanlite.optim.optimizer import GatedOptimizer
from titanlite.parallel import clip, data
from titanlite.parallel.exact import ExactGradients
from titanlite.parallel.mesh import AXES
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.parity import __main__ as command
from titanlite.tools.parity import bits, compare, measure, reference
from titanlite.tools.parity.bits import measure_bits
from titanlite.tools.parity.layouts import Layout
from titanlite.tools.parity.measure import measure_layouts
from titanlite.tools.parity.reference import measure_reference
from titanlite.trainer import Trainer

RUN = (sys.executable, "-m", "titanlite.tools.parity")


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configuration of the small test model; the command's temporary folder is in tmp_path / "temporary"."""
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(command, "TemporaryDirectory", partial(tempfile.TemporaryDirectory, dir=tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    return file


def program(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*RUN, *arguments],
        cwd=folder,
        env=clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param(name, marks=pytest.mark.soak) for name in ("1x1x1x2", "1x2x2x1")])
def test_layouts_of_several_world_sizes_agree(more: str, config_file: Path) -> None:
    """Steps of two training stages in float64, and with bfloat16 compute on float32 weights; table, JSON, and no
    leftover files."""
    folder = config_file.parent
    names = ["2x1x1x1:InterleavedZeroBubble", "1x1x3x1"]
    names.insert(names.index("1x1x3x1") + (more != "1x1x1x2"), more)  # in the order of the table: by number of ranks
    settings = ["--steps", "1", "--training.dtype", "float32", "--training.mixed_precision_param", "bfloat16"]
    stage = {"from_tokens": 2000, "global_batch_size": 24, "seq_len": 32, "rope_theta": 2e4}
    settings += [text for key, value in stage.items() for text in (f"--training.stages.0.{key}", f"{value}")]
    before = {path.name for path in folder.iterdir()}
    done = program(folder, str(config_file), *settings, "--json", "out.json", "--layouts", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert {path.name for path in folder.iterdir()} == before | {"out.json"}
    lines = done.stdout.splitlines()
    assert lines[0] == "reference: one process, plain torch, float64; 2 steps of 16 sequences x 16 tokens"
    assert lines[1].strip() == "stage 2 from step 2 (256 tokens): 24 sequences of 32 tokens; rope_theta 20,000.0"
    assert lines[-1] == "all 4 layouts agree with the reference"
    rows = [line.split() for line in lines if line.endswith("agrees")]
    expected = [(name, dtype) for name in ["1x1x1x1", *names] for dtype in ("float64", "float32/bfloat16/float32")]
    assert [tuple(row[:2]) for row in rows] == expected
    assert all(abs(float(row[3]) - 1.0) < 0.01 for row in rows)
    content = json.loads(Path(folder, "out.json").read_text())
    assert content["agree"] is True
    assert len(content["reference"]["steps"]) == 2
    assert 0 < content["reference"]["steps"][0]["num_valid"] < 16 * 16
    assert content["reference"]["steps"][1]["loss"] != content["reference"]["steps"][0]["loss"]
    assert [(one["layout"], "/".join(dict.fromkeys(one["dtypes"]))) for one in content["layouts"][::2]] == [
        (name, "float64") for name, _ in expected[::2]
    ]
    for one in content["layouts"]:
        assert one["first_difference"] is None
        assert len(one["errors"]) == 2
        assert len(one["errors"][0]["gradients"]) == 21
        worst = max(error for step in one["errors"] for error in step["gradients"].values())
        assert worst <= 1e-11 if one["dtypes"][0] == "float64" else 1e-4 < worst < 0.1


@pytest.mark.soak
@pytest.mark.skipif(torch.__version__ < "2.12", reason="V schedules need torch 2.12")
def test_split_backward_passes_work_with_resharded_units(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages with several layers and sharded parameters, for which unpatched torch loses gradients."""
    settings = ["--model.n_layers", "6", "--training.dtype", "float64", "--training.mixed_precision_param", "float64"]
    settings += ["--steps", "1", "--layouts", "2x1x2x1:InterleavedZeroBubble", "2x1x2x1:ZBVZeroBubble"]
    command.main([str(config_file), *settings])
    assert "all 3 layouts agree" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"fsdp_reshard_after_forward = 'always'"):
        command.main([str(config_file), *settings, "--parallelism.fsdp_reshard_after_forward", "always"])


def test_config_errors_exit_with_2(config_file: Path) -> None:
    arguments = (str(config_file), "--training.seq_lenn", "3", "--ranks", "0")
    done = start_command(config_file.parent, *arguments, program=("-m", "titanlite.tools.parity"))
    assert done.wait() == 2
    assert "training.seq_lenn" in done.output
    assert "--ranks = 0" in done.output
    assert "Traceback" not in done.output


LARGE = [
    *("--float8.recipe", "mxfp8", "--model.dim", "128", "--model.n_kv_heads", "4", "--model.ffn_dim", "64"),
    *("--training.seq_len", "32"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "1x1x17x1"], "layout 1x1x17x1: data.num_streams = 16"),
        (["--layouts", "1x1x2x1", "2x2"], "--layouts = '2x2'"),
        (["--layouts", "2x1x1x1:1f1b"], "rule:   the schedules: GPipe, 1F1B"),
        (["--ranks", "7", "--data.num_streams", "3"], "data.num_streams = 3"),
        (["--json", "no/such/folder/x.json"], "--json = 'no/such/folder/x.json'"),
        (["--model.n_heads", "3"], "model.n_kv_heads"),
        (["--model.n_heads", "3", "--shrink"], "model.n_kv_heads"),
        (["--shrink", *LARGE], "--shrink = True"),
    ],
)
def test_invalid_settings_raise_config_errors(config_file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        command.main([str(config_file), *arguments])
    assert message in str(raised.value)


def raises_on_the_last_rank(config: Any, layouts: Sequence[Layout], steps: int, folder: str, how: str) -> Any:
    """Measure layouts; rank 1 fails with tp = 2."""
    train_step = Trainer.train_step

    def fail(trainer: Trainer, batches: Sequence[Batch]) -> Any:
        if trainer.mesh.degrees["tp"] == 2 and dist.get_rank() == 1:
            if how == "raise":
                raise ValueError("the cause\nin two lines")
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(trainer, batches)

    with patch.object(Trainer, "train_step", fail):
        return measure_layouts(config, layouts, steps, folder)


FAILURES = {
    "raise": "it failed: 1x1x1x2, float64: ValueError: the cause in two lines (tests/distributed/test_parity.py:",
    "kill": "it failed: 1x1x1x2, float64: rank 1 ended with exit code -9",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.soak), "raise"])
def test_a_layout_that_fails_is_reported_and_the_others_compared(
    config_file: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "measure_layouts", partial(raises_on_the_last_rank, how=how))
    with pytest.raises(SystemExit):
        command.main([str(config_file), "--steps", "1", "--layouts", "1x1x1x2", "1x1x2x1"])
    printed = capsys.readouterr().out
    assert f"first difference: {FAILURES[how]}" in printed
    assert "1 of 3 layouts differ; the first: 1x1x1x2" in printed
    assert list((config_file.parent / "temporary").iterdir()) == []


def test_too_little_data_is_reported_once(config_file: Path) -> None:
    np.save("few.npy", np.arange(10, dtype=np.uint16))
    with pytest.raises(UserError) as raised:
        command.main([str(config_file), "--layouts", "1x1x2x1", "--data.sources.0.path", "few.npy"])
    assert str(raised.value).startswith(
        "the reference: no data to train on: tokens few.npy: 1 files, 10 tokens, 0 windows"
    )


def all_masked(config: Any, steps: int, folder: str) -> Any:
    with patch.object(measure, "keep_label", lambda *_: torch.zeros(16, dtype=torch.bool)):
        return measure_reference(config, steps, folder)


def test_steps_without_valid_tokens_are_rejected(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "measure_reference", all_masked)
    with pytest.raises(UserError, match="would prove nothing: step 1 has no valid token"):
        command.main([str(config_file), "--layouts", "1x1x2x1"])


def norm_in_float32(config: Any, steps: int, folder: str) -> Any:
    """Compute norms in float32 for any input dtype: identical on all layouts, so no layout differs."""

    def forward(norm: RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (wide * scale).to(x.dtype) * norm.weight

    with patch.object(RMSNorm, "forward", forward):
        return measure_reference(config, steps, folder)


def rounded_gradient(config: Any, steps: int, folder: str) -> Any:
    """Round a gradient to float32; the forward pass stays exact."""

    def rounded(model: nn.Module, *args: Any) -> float:
        model.get_submodule("layers.1.ffn_norm").weight.register_hook(lambda gradient: gradient.float().double())
        return original(model, *args)

    original = reference.forward_backward
    with patch.object(reference, "forward_backward", rounded):
        return measure_reference(config, steps, folder)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (norm_in_float32, "_to_copy.default gives torch.float32 in layers.0.attention_norm"),
        (rounded_gradient, "_to_copy"),
    ],
)
def test_model_that_loses_precision_is_rejected(
    config_file: Path, wrong: Callable[..., Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "measure_reference", wrong)
    with pytest.raises(UserError, match=f"below float64 although all inputs are float64: .*{place}"):
        command.main([str(config_file), "--layouts", "1x1x2x1"])


def gradients_wrong_from_step_2() -> AbstractContextManager[Any]:
    original = Trainer.forward_backward

    def doubled(trainer: Trainer, batch: Batch, num_valid: Tensor) -> Tensor:
        late = trainer.step > 1 and dist.get_rank() == 1
        return original(trainer, batch, torch.div(num_valid, 2, rounding_mode="floor") if late else num_valid)

    return patch.object(Trainer, "forward_backward", doubled)


def later_blocks_shifted() -> AbstractContextManager[Any]:
    """Initial weights: all blocks of a parameter but the first have the seed of another one."""
    original = hashlib.sha256

    def digest(text: Any) -> Any:
        is_later_block = isinstance(text, bytes) and text.count(b":") == 2 and not text.endswith(b":0")
        return original(text + b"0" if is_later_block else text)

    return patch.object(init.hashlib, "sha256", digest)


def larger_updates_on_rank_1() -> AbstractContextManager[Any]:
    original = GatedOptimizer.set_lr
    return patch.object(
        GatedOptimizer, "set_lr", lambda self, lr: original(self, lr * (1 + 1e-9 * (dist.get_rank() == 1)))
    )


def clipped_to_own_norms() -> AbstractContextManager[Any]:
    """Each rank clips to the norm of its shards; the norm of the step, which is compared, is right."""
    return patch.object(measure, "clip_grad_norm_", lambda parts, norm, _: clip_of_own(parts, norm))


def clip_of_own(parts: Sequence[nn.Module], max_norm: float) -> None:
    with patch.object(clip, "_shard_groups", lambda _: ()):
        clip.clip_grad_norm_(parts, max_norm, None)


def reduced_in_the_dtype_of_computation() -> AbstractContextManager[Any]:
    original = data.MixedPrecisionPolicy
    return patch.object(data, "MixedPrecisionPolicy", lambda **dtypes: original(param_dtype=dtypes["param_dtype"]))


PLANTED = {
    "average": (changed(averaging_reduction), "step 1, gradient of "),
    "step 2": (gradients_wrong_from_step_2, "step 2, loss"),
    "init": (later_blocks_shifted, "initial weights: tok_embeddings.weight"),
    "update": (larger_updates_on_rank_1, "update of tok_embeddings.weight, given equal gradients: "),
    "clip": (clipped_to_own_norms, "update of tok_embeddings.weight, given equal gradients: "),
    "dtype": (reduced_in_the_dtype_of_computation, "dtypes of parameters/compute/reduction: float32/bfloat16/bfloat16"),
}


def planted_on_ranks(config: Any, layouts: Sequence[Layout], steps: int, folder: str, name: str) -> Any:
    with PLANTED[name][0]() if dist.get_world_size() > 1 else nullcontext():
        return measure_layouts(config, layouts, steps, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["clip", *(pytest.param(name, marks=pytest.mark.soak) for name in PLANTED if name != "clip")]
)
def test_a_planted_mistake_is_the_first_difference(
    config_file: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "measure_layouts", partial(planted_on_ranks, name=name))
    settings = ["--optimizer.name", "AdamW", "--training.max_norm", "1.0", "--shrink", "--layouts", "1x1x2x1"]
    # In float64, all dtypes are equal.
    dtypes = ["--training.dtype", "float32", "--training.mixed_precision_param", "bfloat16"] if name == "dtype" else []
    with pytest.raises(SystemExit) as ended:
        command.main([str(config_file), *settings, *dtypes, "--json", "out.json"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    dtype = "float32/bfloat16/float32" if dtypes else "float64"
    assert f"    first difference: {PLANTED[name][1]}" in printed
    assert f"1 of 2 layouts differ; the first: 1x1x2x1, {dtype}: {PLANTED[name][1]}" in printed
    content = json.loads(Path("out.json").read_text())
    assert content["agree"] is False
    assert name != "average" or content["layouts"][1]["grad_norm_ratio"] == pytest.approx(0.5)


def bits_without_rounding(config: Any, layouts: Sequence[Layout], steps: int, folder: str) -> Any:
    """Gradients that are not rounded to a grid before they are added up, where there are several ranks."""
    rounded = ExactGradients._rounding
    planted = (lambda *_: lambda _: None) if dist.get_world_size() > 1 else rounded
    with patch.object(ExactGradients, "_rounding", planted):
        return measure_bits(config, layouts, steps, folder)


@pytest.mark.slow
def test_bits_are_compared_with_the_first_layout_of_the_same_shapes(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ["--bits", "--training.dtype", "float32", "--shrink", "--parallelism.gradient_sync", "every", "--layouts"]
    with pytest.raises(SystemExit) as ended:
        command.main([str(config_file), "--json", "out.json", *exact, "2x1x1x1", "1x1x2x1", "1x1x1x2"])
    assert ended.value.code == 0
    *_, one, pipeline, sharded, tensor, alone = capsys.readouterr().out.splitlines()
    assert one.endswith("the first with its tp, cp and ep")
    assert pipeline.split()[1:] == sharded.split()[1:] == [*one.split()[1:3], "equal", "to", "1x1x1x1"]
    assert tensor.endswith("the first with its tp, cp and ep")
    assert tensor.split()[2] != one.split()[2]
    assert alone == "not compared, since no other layout has the same degrees of tp, cp and ep: 1x1x1x2"
    assert [each["difference"] for each in json.loads(Path("out.json").read_text())["layouts"]] == [""] * 4

    with pytest.raises(UserError, match="nothing to compare: no two layouts, one process among them, have the same"):
        command.main([str(config_file), *exact, "1x1x1x2"])

    monkeypatch.setattr(bits, "measure_bits", bits_without_rounding)
    with pytest.raises(SystemExit) as ended:
        command.main([str(config_file), *exact, "1x1x2x1"])
    assert ended.value.code == 1
    step = r"DIFFERS from 1x1x1x1: step 1: (grad norm|weights) \S+ instead of \S+; "
    assert re.search(rf"{step}\d+ of \d+ tensors differ, the first is ", capsys.readouterr().out)


def another_choice_on_rank_1() -> AbstractContextManager[Any]:
    """One position of each microbatch of rank 1 chooses another expert, as in a near tie."""
    original = MixtureOfExperts.choose

    def choose(mixture: MixtureOfExperts, probabilities: Tensor) -> Tensor:
        chosen = original(mixture, probabilities)
        if dist.get_rank() == 1:
            chosen[0, 0, -1] = probabilities[0, 0].argmin()
        return chosen

    return patch.object(MixtureOfExperts, "choose", choose)


PLANTED["choice"] = another_choice_on_rank_1, "step 1, choice of experts: 4 of 128 positions"


OF_EXPERTS = (
    *("--model.family", "qwen3_moe", "--training.dtype", "float32", "--steps", "1", "--shrink"),
    *("--training.mixed_precision_param", "bfloat16", "--layouts", "1x1x2x1-ep2"),
)


@pytest.mark.slow
def test_another_choice_of_an_expert_is_a_difference_and_below_float64_replayed(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "measure_layouts", partial(planted_on_ranks, name="choice"))
    with pytest.raises(SystemExit):
        command.main([str(config_file), *OF_EXPERTS])
    printed = capsys.readouterr().out.splitlines()
    assert f"the first: 1x1x2x1-ep2, float64: {PLANTED['choice'][1]}" in printed[-1]
    # In bfloat16, the experts of the reference compute, and their other choices are within the bound.
    assert sum(line.startswith("1x1x2x1-ep2  float32") and line.endswith("agrees") for line in printed) == 1


def reference_in_float8(config: Any, steps: int, folder: str) -> Any:
    with small_blocks():
        return measure_reference(config, steps, folder)


def layouts_in_float8(config: Any, layouts: Sequence[Layout], steps: int, folder: str) -> Any:
    """With tp, each rank has its own scales."""

    def of_rank(x: Tensor, weight: Tensor, settings: Float8, which: ProductName) -> Tensor:
        return float8_product(x, weight, replace(settings, maximum=None, gradient_maximum=None), which)

    measured = []
    for layout in layouts:
        planted = of_rank if layout.degrees[AXES.index("tp")] > 1 else float8_product
        with small_blocks(), patch.object(float8, "float8_product", planted):
            measured += measure_layouts(config, [layout], steps, folder)
    return measured


IN_FLOAT8 = [
    ("rowwise", "float32", EXPERTS, ("1x1x2x1-ep2", "1x1x1x2")),
    ("mxfp8", "ceil", (), ("2x1x1x1:ZBVZeroBubble", "1x1x1x1-cp2", "1x1x3x1")),
    ("blockwise", "float32", EXPERTS, ("2x1x1x1:1F1B", "1x1x3x1", "1x1x2x1")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "scale", "others", "layouts"),
    [IN_FLOAT8[0], *(pytest.param(*case, marks=pytest.mark.soak) for case in IN_FLOAT8[1:])],
)
def test_below_float64_products_have_the_float8_operands_of_the_reference(
    recipe: str,
    scale: str,
    others: Sequence[str],
    layouts: Sequence[str],
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Errors are those of float32, and a scale of a rank is found by the operands."""
    monkeypatch.setattr(compare, "measure_reference", reference_in_float8)
    monkeypatch.setattr(compare, "measure_layouts", layouts_in_float8)
    settings = ["--steps", "1", "--training.dtype", "float32", "--float8.recipe", recipe, "--float8.scale", scale]
    settings += [*(f"--{each}" for each in others), "--layouts", *layouts, "--json", "out.json"]
    with small_blocks(), suppress(SystemExit):
        command.main([str(config_file), *settings])
    found = [each for each in json.loads(Path("out.json").read_text())["layouts"] if each["dtypes"][0] == "float32"]
    assert len(found) == 1 + len(layouts)
    for each in found:
        assert max(error for step in each["errors"] for error in step["gradients"].values()) < 5e-6
        assert each["flipped_operands"] is not None
        if each["layout"] == "1x1x1x2":
            assert each["first_difference"].startswith("step 1, float8, layers.0.attention.wo: x of output: ")
        else:
            assert each["first_difference"] is None
    assert "the operands of the reference computed" in capsys.readouterr().out


@pytest.mark.soak
def test_a_large_learning_rate_is_no_difference(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--optimizer.lr", "1.0", "--steps", "3", "--training.dtype", "float32", "--layouts", "1x1x2x1"]
    command.main([str(config_file), *settings])
    assert "all 2 layouts agree" in capsys.readouterr().out


def test_masks_depend_on_the_sequence_alone() -> None:
    config = small_config(1)
    masks = {number: measure.keep_label(config, number, number % 16, 16) for number in range(40)}
    shares = {number: mask.double().mean().item() for number, mask in masks.items()}
    assert {number: shares[number] for number in (0, 1, 16, 17, 32, 33)} == dict.fromkeys((0, 16, 32), 0.0) | (
        dict.fromkeys((1, 17, 33), 1.0)
    )
    assert len({round(share, 3) for share in shares.values()}) > 8
    single = replace(config, training=replace(config.training, global_batch_size=1))
    assert 0 < measure.keep_label(single, 0, 0, 16).sum() < 16
    again = measure.keep_label(replace(config, training=replace(config.training, local_batch_size=8)), 7, 7, 16)
    assert torch.equal(again, masks[7])
    assert not torch.equal(measure.keep_label(replace(config, debug=replace(config.debug, seed=1)), 7, 7, 16), masks[7])
