"""Blocks that recompute, and combinations that are refused."""

from typing import Any, Literal

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from titanlite.config.load import load_config
from titanlite.models import linear
from titanlite.models.experts import grouped_feed_forward
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.parallel.pipeline import SCHEDULES
from titanlite.parallel.recompute import (
    ActivationCheckpointConfig,
    _recomputed,
    apply_recompute,
    by_operation,
    recomputes,
)
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.torch_internals import functional_collectives, linear_of_onednn

SOURCE = ["--data.sources.0.kind", "tokens", "--data.sources.0.path", "tokens.npy", "--model.vocab_size", "128"]


def chosen(section: ActivationCheckpointConfig) -> list[int]:
    return [index for index in range(7) if recomputes(section, index)]


def test_blocks_are_chosen_by_index() -> None:
    assert chosen(ActivationCheckpointConfig()) == []
    assert chosen(ActivationCheckpointConfig("full")) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "op")) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "layer")) == [0, 2, 4, 6]


def refused(*settings: str) -> set[str]:
    """Keys of the problems of a configuration with two pipeline ranks."""
    shape = ["--parallelism.pp", "2", "--training.local_batch_size", "8", "--model.n_layers", "4"]
    try:
        load_config([*SOURCE, *shape, *settings], world_size=2, device_type="cpu")
    except ConfigError as error:
        return {problem.key for problem in error.problems} - {"data.sources.0.path"}
    return set()


BY_OP = ["--activation_checkpoint.mode", "selective"]
LAYER = ["--activation_checkpoint.selective_policy", "layer"]
BUDGET = ["--activation_checkpoint.mode", "memory_budget"]
COMPILE = ["--compile.enable", "true"]
DOCUMENTS = ["--data.document_mask", "true"]
EXPERTS = ["--model.family", "qwen3_moe"]  # whose blocks are not compiled
POLICY, MODE = "activation_checkpoint.selective_policy", "activation_checkpoint.mode"
SCHEDULE = "parallelism.pp_schedule"


def by(schedule: PipelineSchedule, *settings: str) -> list[str]:
    return [f"--{SCHEDULE}", schedule, *settings]


COMBINATIONS: list[tuple[str, list[str], set[str]]] = [
    *(
        ("2.13.0", by(schedule, *settings), keys)
        for schedule, shape in SCHEDULES.items()
        if shape.splits_backward
        for settings, keys in (
            (BY_OP, {POLICY}),
            ([*BY_OP, *EXPERTS, *COMPILE], {POLICY}),
            ([*BY_OP, *COMPILE], set()),
            ([*BY_OP, *LAYER], set()),
            (["--activation_checkpoint.mode", "full"], set()),
        )
    ),
    *(("2.13.0", by(schedule, *BY_OP), set()) for schedule, shape in SCHEDULES.items() if not shape.splits_backward),
    *(("2.12.1", by(name), {SCHEDULE} if shape.splits_backward else set()) for name, shape in SCHEDULES.items()),
    ("2.13.0", by("InterleavedZeroBubble", *COMPILE), set()),
    ("2.11.0", by("Interleaved1F1B", *COMPILE), set()),
    ("2.13.0", by("InterleavedZeroBubble", *DOCUMENTS), set()),
    ("2.11.0", by("Interleaved1F1B", *DOCUMENTS), set()),
    ("2.13.0", [*BUDGET, *COMPILE], set()),
    ("2.13.0", BUDGET, {MODE}),
    ("2.13.0", [*BUDGET, *COMPILE, *EXPERTS], {MODE}),
    ("2.13.0", [*BUDGET, *COMPILE, "--compile.backend", "eager"], {MODE}),
    ("2.13.0", [*BUDGET, *COMPILE, "--parallelism.tp", "2"], {MODE, "parallelism.pp"}),  # there are 2 ranks
    (
        "2.13.0",
        [*BUDGET, *COMPILE, "--activation_checkpoint.memory_budget", "1.1"],
        {"activation_checkpoint.memory_budget"},
    ),
]
"""A version of torch, settings, and the keys that are refused with them."""


def test_combinations_that_do_not_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, settings, keys in COMBINATIONS:
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert refused(*settings) == keys, (version, settings)


CONFIG = Llama3Config(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=50, max_seq_len=32)


@pytest.mark.skipif(not linear.HAS_ONEDNN, reason="torch does not multiply by oneDNN here")
@pytest.mark.parametrize(("mode", "again"), [("selective", 0), ("full", 6)])
def test_products_by_onednn_are_saved(
    mode: Literal["selective", "full"], again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, products = Llama3(CONFIG), 0
    model.init_buffers(torch.device("cpu"))
    apply_recompute(model, LLAMA3.structure(CONFIG), ActivationCheckpointConfig(mode=mode))
    linear.use_own_products(model.modules())

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return linear_of_onednn(x, weight)

    monkeypatch.setattr(linear, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(linear, "linear_of_onednn", counted)
    x = torch.randn(2, 32, CONFIG.dim, requires_grad=True)
    out = model.layers["0"](x, model.rope(None), None)
    assert products == 7
    out.sum().backward()
    assert products == 7 + again + 2 * 7  # of the last one, backward needs no result


class GroupedProducts(TorchDispatchMode):
    """Counts products of experts on GPUs, which torch also has for CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.found += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("selective", 0), ("full", 2)])
def test_grouped_products_are_saved(mode: Literal["selective", "full"], again: int) -> None:
    """The last one is not needed by its backward pass."""
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    shapes = ((4, 24, 16), (4, 16, 24), (4, 24, 16))
    weights = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    forward = _recomputed(grouped_feed_forward, ActivationCheckpointConfig(mode=mode))
    with GroupedProducts() as products:
        out = forward(rows, torch.tensor([8, 0, 16, 8]), *weights)
        assert products.found == 3
        out.backward(torch.ones_like(out))
    assert products.found == 3 + again + 2 * 3


class CopiesOfCounts(TorchDispatchMode):
    """Counts copies from the device "meta", in place of a GPU, to the host, where all numbers are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._to_copy.default and kwargs["device"].type == "cpu":
            self.found += 1
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("selective", 0), ("full", 1)])
def test_copies_to_the_host_are_saved(mode: Literal["selective", "full"], again: int) -> None:
    """Each one waits for the device."""

    def forward(x: Tensor) -> Tensor:
        parts = x.split((x > 0).sum(0).tolist())
        return torch.cat([part.sin() for part in parts])

    x = torch.ones(3, 3, device="meta", requires_grad=True)
    with CopiesOfCounts() as copies:
        out = _recomputed(forward, ActivationCheckpointConfig(mode=mode))(x)
        assert copies.found == 1
        out.backward(torch.ones_like(out))
    assert copies.found == 1 + again


def test_exchanges_of_counts_are_saved() -> None:
    """Not those of rows, nor those of context parallelism."""
    exchange = functional_collectives().all_to_all_single.default
    for dtype, policy in (
        (torch.int64, CheckpointPolicy.MUST_SAVE),
        (torch.bfloat16, CheckpointPolicy.PREFER_RECOMPUTE),
    ):
        assert by_operation(None, exchange, torch.ones(1, dtype=dtype), [1], [1], "4") == policy


def saved_and_gradients(section: ActivationCheckpointConfig) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a compiled block saves for its backward pass beside parameters and tables, and its gradients."""
    torch._dynamo.reset()
    model = Llama3(CONFIG)
    model.init_buffers(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    apply_compile(model, LLAMA3.structure(CONFIG), CompileConfig(enable=True, backend="aot_eager"))
    apply_recompute(model, LLAMA3.structure(CONFIG), section)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 32, CONFIG.dim, generator=generator, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model.layers["0"](x, model.rope(None), None)
    out.square().sum().backward()
    block = model.layers["0"].named_parameters()
    return sum(saved.values()), {name: parameter.grad for name, parameter in block if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so
def test_compiled_blocks_save_their_share_of_the_memory_budget() -> None:
    try:
        unlimited, expected = saved_and_gradients(ActivationCheckpointConfig())
        half, of_half = saved_and_gradients(ActivationCheckpointConfig("memory_budget", memory_budget=0.5))
        least, of_least = saved_and_gradients(ActivationCheckpointConfig("memory_budget", memory_budget=0.0))
        again, _ = saved_and_gradients(ActivationCheckpointConfig())  # the budget of another model does not stay
    finally:
        functorch_config.activation_memory_budget = 1.0
    block_input = 2 * 32 * CONFIG.dim * 4
    assert least == block_input
    assert 0.4 * unlimited <= half <= 0.6 * unlimited
    assert again == unlimited > 8 * block_input
    for gradients in (of_half, of_least):
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
