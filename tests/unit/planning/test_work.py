"""The listed work of blocks and of the loss against operations that real passes dispatch on a CPU; the FLOPs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.reference import small_config
from titanlite.models.attention import MaskForm
from titanlite.models.family import LanguageModel, resolve_model
from titanlite.models.float8 import RECIPES, RecipeName
from titanlite.models.registry import FAMILIES
from titanlite.parallel.float8 import Float8Config, apply_float8
from titanlite.planning.activations import BlockKind, Features, MicrobatchShape, activation_bytes, features_of
from titanlite.planning.estimate import estimate
from titanlite.planning.work import Elementwise, Float8Products, Work, block_work, embedding_work, head_work

ROWS, SEQ_LEN, CHUNK = 2, 128, 64
LENGTH = f"model.max_seq_len={SEQ_LEN}"
OPS = Elementwise(4, 4, on_cpu=True, compiled=False)


class Trace(TorchDispatchMode):
    """FLOPs of matrix products, bytes of the inputs and outputs of other operations, and their number. Views, which do
    nothing, are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, returns = func._schema.name, func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if is_view or name in ("aten::detach", "aten::_unsafe_view"):
            return result
        self.operations += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            first, second = inputs[-2:]
            self.flops += 2 * first.numel() * second.shape[-1]
        elif not any(kernel in name for kernel in ("scaled_dot_product", "capped_attention", "gated_delta_rule")):
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.moved += sum(map(own_bytes, [*inputs, *results]))
        return result


def own_bytes(tensor: Tensor) -> int:
    """Expanded dimensions are read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size()


def assert_close(work: Work, trace: Trace, *, moved: float = 0.1) -> None:
    assert sum(product.flops for product in work.products) == trace.flops
    assert work.moved == pytest.approx(trace.moved, rel=moved)
    assert work.operations == pytest.approx(trace.operations, rel=0.35)


@pytest.fixture(params=FAMILIES)
def built(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any, Any]:
    return debug_model(request.param)


def debug_model(family_name: str, *settings: str) -> tuple[LanguageModel, Any, Any]:
    """The debug model of a family, its hyper-parameters and plan."""
    bands = ["model.sliding_window=16"] if family_name in ("mistral", "olmo3", "gemma2", "gemma3", "gpt_oss") else []
    bands += ["model.n_kv_heads=4"] * (family_name == "deepseek_v3")
    family_settings = (f"model.family={family_name}", "model.flavor=debug", LENGTH, *bands, *settings)
    config = small_config(1, *family_settings, "training.dtype=float32")
    family, hyper_parameters = resolve_model(config.model)
    torch.manual_seed(0)
    model = family.build(hyper_parameters)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.init_buffers(torch.device("cpu"))
    return model, hyper_parameters, family.structure(hyper_parameters)


def shape_of(*, recomputes_logits: bool = False) -> MicrobatchShape:
    return MicrobatchShape(ROWS, SEQ_LEN, 1, 1, 4, 4, CHUNK, shard_logits=False, recomputes_logits=recomputes_logits)


def test_a_block(built: tuple[LanguageModel, Any, Any]) -> None:
    model, config, structure = built
    features = features_of(model, structure)
    layers = {kind: index for index, kind in enumerate(shape_of().kinds(config))}  # one of each kind
    for kind, index in layers.items():
        check_block(model.get_submodule(f"layers.{index}"), model.get_submodule("rope")(None), config, features, kind)


@pytest.mark.parametrize(
    ("family", "mask", "keeps"),
    [("llama3", None, 0), ("llama3", "blocks", 2), ("mistral", None, 2), ("gpt_oss", None, 2)],
)
def test_inputs_of_a_compiled_attention_that_op_keeps(family: str, mask: MaskForm | None, keeps: int) -> None:
    """Rotated queries and keys of those of two layers that FlexAttention computes, unless the block is compiled."""
    model, config, structure = debug_model(family, "model.n_layers=2", "model.n_kv_heads=2")
    shape = replace(shape_of(), form="blocks", mask=mask)
    shapes = (replace(shape, compiled=compiled) for compiled in (False, True))
    kept = [sum(activation_bytes(config, features_of(model, structure), each).blocks_by_op) for each in shapes]
    heads = (config.n_heads + config.n_kv_heads) * config.head_dim
    assert kept[0] - kept[1] == keeps * ROWS * SEQ_LEN * heads * 4
    assert shape_of().uses_bands(config, 16)
    assert not shape.uses_bands(config, 16)


@pytest.mark.parametrize(("name", "family"), [("mxfp8", "llama3"), ("rowwise", "qwen3_moe")])
def test_a_block_with_emulated_float8(name: RecipeName, family: str) -> None:
    model, config, plan = debug_model(family, "model.n_kv_heads=4", "model.ffn_dim=64")
    apply_float8(model, plan, Float8Config(recipe=name), None)
    float8 = Float8Products(on_device=False, of_tokens=RECIPES[name].of_tokens)
    (kind,) = set(shape_of().kinds(config))
    features = features_of(model, plan)
    check_block(model.get_submodule("layers.0"), model.get_submodule("rope")(None), config, features, kind, float8)


def check_block(
    block: torch.nn.Module,
    rope: Any,
    config: Any,
    features: Features,
    kind: BlockKind,
    float8: Float8Products | None = None,
) -> None:
    x = torch.randn(ROWS, SEQ_LEN, config.dim, requires_grad=True)
    with Trace() as forward:
        y = block(x, rope, None)
    gradient = torch.randn_like(y)
    with Trace() as backward:
        y.backward(gradient)
    work = block_work(config, features, shape_of(), 1, replace(OPS, float8=float8), kind)
    assert_close(work.forward, forward)
    assert_close(work.input_gradient + work.weight_gradient, backward)


def test_the_embedding_and_the_loss() -> None:
    config = small_config(1, "model.flavor=debug", "training.dtype=float32", LENGTH)
    family, hyper_parameters = resolve_model(config.model)
    model = family.build(hyper_parameters)
    model.init_buffers(torch.device("cpu"))
    vocab_size, dim = hyper_parameters.vocab_size, hyper_parameters.dim
    labels = torch.randint(vocab_size, (ROWS, SEQ_LEN))
    embedding = embedding_work(hyper_parameters, shape_of(), OPS)
    with Trace() as forward:
        model.get_submodule("tok_embeddings")(labels)
    # the operation's input is the entire weight, of which it reads the rows of the tokens
    found = embedding.forward.moved / 2
    assert forward.moved == pytest.approx(vocab_size * dim * 4 + labels.numel() * 8 + found)
    head = head_work(hyper_parameters, shape_of(), OPS)
    assert head.forward.flops == 3 * 2 * ROWS * SEQ_LEN * dim * vocab_size  # forward, and both gradients at once
    split = head_work(hyper_parameters, shape_of(recomputes_logits=True), OPS)
    assert split.forward.flops == split.again.flops == split.input_gradient.flops == head.forward.flops // 3


GPIPE = ["parallelism.pp_schedule=GPipe", "parallelism.pp=2"]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.tie_embeddings=true"],
        ["parallelism.pp=2", "parallelism.tp=2"],
        ["model.family=olmo3", "model.sliding_window=4", *GPIPE, "parallelism.tp=2"],
        ["model.family=deepseek_v3", "model.n_kv_heads=4", "model.n_further_tokens=1", *GPIPE],
    ],
)
def test_ranks_add_up_to_the_model(settings: list[str]) -> None:
    config = small_config(4, *settings, "activation_checkpoint.mode=full")
    family, model = resolve_model(config.model)
    plan = estimate(config, 4, device_type="cpu")
    tokens = config.training.global_batch_size * config.training.seq_len
    copies = 4 // len(plan.ranks)
    assert copies * sum(rank.flops for rank in plan.ranks) == tokens * family.flops_per_token(model, 16)
    output = 6 * model.vocab_size * model.dim * (1 + model.n_further_tokens)
    blocks = family.flops_per_token(model, 16) - output
    logits = output if GPIPE[0] in settings else 0  # whose backward pass computes them again
    assert copies * sum(rank.recomputed_flops for rank in plan.ranks) == tokens * (blocks + logits) // 3
