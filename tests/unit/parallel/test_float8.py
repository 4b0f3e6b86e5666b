"""Which layers multiply in float8."""

import pytest
import torch

from tests.distributed.layouts import DEEPSEEK_V3
from tests.distributed.reference import small_config
from titanlite.models.registry import full_model
from titanlite.parallel.float8 import Float8Config, apply_float8, check_float8, multiplies_on_device
from titanlite.parallel.mesh import ParallelismConfig

CONFIG = small_config(1, *DEEPSEEK_V3)
STRUCTURE = CONFIG.family.structure(CONFIG.hyper_parameters)


def test_linear_layers_and_experts_of_blocks() -> None:
    """Not the output layer, the router and the embedding, nor what is excluded."""
    with torch.device("meta"):
        model = CONFIG.family.build(CONFIG.hyper_parameters)
    section = Float8Config(recipe="rowwise", exclude=("layers.0.feed_forward.*", "*.shared.w1"))
    (line,) = apply_float8(model, STRUCTURE, section, None)
    applied = {name for name, module in model.named_modules() if hasattr(module, "products")}
    attention = {
        f"layers.{index}.attention.{name}" for index in (0, 1) for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")
    }
    assert applied == attention | {f"layers.1.feed_forward.shared.{name}" for name in ("w2", "w3")}
    assert model.get_submodule("layers.1.feed_forward.experts").feed_forward.keywords.keys() == {"products"}  # type: ignore[union-attr]
    assert line == "float8 (rowwise, 13 layers emulated)"
    (line,) = apply_float8(model, STRUCTURE, section, None, on_device=True)
    assert line == "float8 (rowwise, 2 layers by the matrix unit, 11 layers emulated)"


def test_sizes_that_do_not_fit_are_counted() -> None:
    section, model = Float8Config(recipe="mxfp8"), full_model(CONFIG.model)
    sizes, seq_len = check_float8(section, model, STRUCTURE, ParallelismConfig(tp=2), 48)
    assert "layers.0.attention.wq_a has 12 outputs (the next size is 32), and " in sizes.rule
    assert sizes.remedy.endswith(" or parallelism.tp")  # no exclude would leave a layer
    assert seq_len.rule.startswith("divisible by 64")  # layers that compute only a rank's own positions
    assert seq_len.remedy == "set training.seq_len = 64"
    section = Float8Config(recipe="mxfp8", exclude=("*.w[!q]*", "*_a", "layers.1.*"))
    (sizes,) = check_float8(section, model, STRUCTURE, ParallelismConfig(tp=2), 64)
    assert sizes.rule.endswith(", and 1 more size does not fit")


@pytest.mark.parametrize(
    ("section", "capability", "dtype", "expected"),
    [
        (Float8Config(recipe="rowwise"), (9, 0), torch.bfloat16, True),
        (Float8Config(recipe="rowwise"), (8, 9), torch.bfloat16, False),
        (Float8Config(recipe="rowwise"), (9, 0), torch.float32, False),
        (Float8Config(recipe="rowwise", product="emulated"), (9, 0), torch.bfloat16, False),
        (Float8Config(recipe="blockwise"), (9, 0), torch.bfloat16, False),
    ],
)
def test_products_of_the_device(
    section: Float8Config,
    capability: tuple[int, int],
    dtype: torch.dtype,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert multiplies_on_device(section, "cuda", dtype) == expected
    assert not multiplies_on_device(section, "cpu", dtype)
