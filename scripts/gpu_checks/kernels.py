"""Check 2: the operations of a model, forward and backward, against float64 on the host."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_checks.rows import Emit, Found, WrongError, require_errors, run_case
from gpu_checks.workload import Setup, difference
from titanlite.models.attention import pin_kernels
from titanlite.models.experts import clamped_swiglu, grouped_feed_forward, swiglu
from titanlite.models.experts import feed_forward as expert_loop
from titanlite.models.family import Structure
from titanlite.models.float8 import RECIPES, Float8, RecipeName
from titanlite.models.head import LossComputation, OutputLayer
from titanlite.models.layers import FeedForward, RMSNorm, RotaryEmbedding
from titanlite.models.linear import multiplied
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.registry import build_optimizer
from titanlite.parallel.float8 import Float8Config, multiplies_on_device
from titanlite.parallel.mesh import ShardGroups

CHECK = "2 kernels"
SUMS = 256
"""Roundings that float32 may need in addition, for sums of up to 7,168 terms. With TF32 it would need 8,000."""
THETA = 10_000.0
DTYPES = (torch.float32, torch.bfloat16)
EXPERT_ROWS = (0, 1, 130, 7, 0, 86, 0)
"""Rows of each expert: the first, the last and one between have none."""

OPTIMIZERS = {
    "fused AdamW": (OptimizerConfig(lr=1e-2), 1e-5),
    # its iterations raise small singular values, and their rounding errors, about 480-fold
    "Muon": (OptimizerConfig(name="Muon", lr=1e-2), 1e-3),
    "Muon, orthogonalized in bfloat16": (OptimizerConfig(name="Muon", lr=1e-2, newton_schulz_dtype="bfloat16"), 0.05),
    "Lion": (OptimizerConfig(name="Lion", lr=1e-2), 1e-5),
    "SGD with momentum": (OptimizerConfig(name="SGD", lr=1e-2, momentum=0.9), 1e-5),
    # a random rounding of a moment by 1/256 may go the other way
    "AdamW with moments in bfloat16": (OptimizerConfig(lr=1e-2, state_dtype="bfloat16"), 1e-2),
}
"""Optimizers, with a bound on the relative error of the change of the weights."""


@dataclass(frozen=True)
class Kernel:
    """An operation and what it should compute.

    run, expect: the function of the inputs, and the same in plain formulas, which is computed in float64. shapes: of
    the inputs; matrices are scaled to keep the size of what they multiply. roundings: how many times a result may be
    rounded to the dtype; each changes it by at most eps / 2.
    """

    run: Callable[..., Tensor]
    expect: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    roundings: int


def check(emit: Emit, setup: Setup) -> None:
    pin_kernels(setup.device)
    for dtype in DTYPES:
        for name, kernel in kernels(setup).items():
            case = partial(compare, kernel, dtype, setup.device)
            emit(run_case(CHECK, f"{name}, {str(dtype).removeprefix('torch.')}", case))
    emit(run_case(CHECK, "experts without rows, bfloat16", lambda: unused_experts(setup)))
    for name, (section, bound) in OPTIMIZERS.items():
        emit(run_case(CHECK, f"{name}, float32", partial(updates, section, bound, setup)))


def compare(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> Found:
    """Compare the result and the gradients of all inputs. The inputs are rounded to the dtype on both sides."""
    generator = torch.Generator().manual_seed(0)
    scales = [shape[-1] ** -0.5 if len(shape) == 2 else 1.0 for shape in kernel.shapes]
    sizes = zip(kernel.shapes, scales, strict=True)
    drawn = [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape, scale in sizes]
    own = [tensor.to(device).requires_grad_() for tensor in drawn]
    exact = [tensor.double().requires_grad_() for tensor in drawn]
    out, expected = kernel.run(*own), kernel.expect(*exact)
    assert out.shape == expected.shape, f"{tuple(out.shape)}, not {tuple(expected.shape)}"
    upstream = torch.ones_like(expected) if expected.dim() == 1 else torch.randn(expected.shape, generator=generator)
    upstream = upstream.to(out.dtype)
    found = [out, *torch.autograd.grad(out, own, upstream.to(device))]
    right = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    names = ["result", *(f"gradient {index}" for index in range(len(own)))]
    errors = {name: difference(one, other) for name, one, other in zip(names, found, right, strict=True)}
    bound = (kernel.roundings + SUMS * (dtype == torch.float32)) * torch.finfo(dtype).eps / 2
    return require_errors(errors, dict.fromkeys(errors, bound))


def kernels(setup: Setup) -> dict[str, Kernel]:
    """The operations, in shapes that their fast kernels take."""
    device = setup.device
    rows, dim, wide, vocab = (32, 64, 96, 131) if setup.tiny else (256, 2048, 7168, 8191)
    seq_len, head_dim = (300, 16) if setup.tiny else (512, 128)
    rope = RotaryEmbedding(head_dim, seq_len, THETA, None)
    rope.init_buffers(device, torch.float32)
    frequencies = THETA ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    labels = torch.randint(vocab, (2, rows), generator=torch.Generator().manual_seed(1))
    labels[:, ::7] = -1
    head = ((2, rows, dim), (vocab, dim))
    narrow = 96 if setup.tiny else 1536
    matrices = ((narrow, dim), (dim, narrow), (narrow, dim))  # of an expert; those of all lie one below the other
    experts = ((1, sum(EXPERT_ROWS), dim), *((len(EXPERT_ROWS) * out, features) for out, features in matrices))
    biases = tuple((len(EXPERT_ROWS) * out,) for out, _ in matrices)
    with torch.device("meta"):  # their weights are inputs of the kernels
        feed_forward, output, norm = FeedForward(dim, wide), OutputLayer(dim, vocab), RMSNorm(dim, 1e-5)
    output.computation = LossComputation(chunk_tokens=48)  # does not divide the tokens

    def float8(recipe: RecipeName) -> Kernel:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            on_device = multiplies_on_device(Float8Config(recipe=recipe), device.type, x.dtype)
            return multiplied(x, weight, products=Float8(RECIPES[recipe], "ceil", on_device=on_device))

        emulated = partial(multiplied, products=Float8(RECIPES[recipe], "ceil"))
        sizes = ((128, 128), (128, 128)) if setup.tiny else ((rows, dim), (wide, dim))  # multiples of all blocks
        return Kernel(run, emulated, sizes, 2)

    return {
        "product": Kernel(lambda x, w: x @ w.T, lambda x, w: x @ w.T, ((rows, dim), (wide, dim)), 2),
        **{f"float8, {recipe}": float8(recipe) for recipe in RECIPES},
        "rotary embedding": Kernel(rope(None).rotate, partial(_rotate, angles), ((2, seq_len, 4, head_dim),), 2),
        "RMSNorm": Kernel(partial(_module, norm), partial(_rms_norm, 1e-5), ((rows, dim), (dim,)), 4),
        "SwiGLU": Kernel(
            partial(_module, feed_forward), _swiglu, ((1, rows, dim), (wide, dim), (dim, wide), (wide, dim)), 6
        ),
        "experts": Kernel(partial(_experts, True), partial(_experts, False), experts, 6),
        "experts, biases": Kernel(partial(_experts, True), partial(_experts, False), (*experts, *biases), 12),
        "embedding": Kernel(
            lambda w: functional.embedding(labels.clamp(min=0).to(device), w),
            lambda w: w[labels.clamp(min=0)],
            ((vocab, dim),),
            16,
        ),
        "loss, gradients in forward": Kernel(
            partial(_loss, output, labels, False), partial(_plain_loss, labels), head, 6
        ),
        "loss, logits again in backward": Kernel(
            partial(_loss, output, labels, True), partial(_plain_loss, labels), head, 6
        ),
    }


def _rotate(angles: Tensor, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _rms_norm(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _module(module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
    names = [name for name, _ in module.named_parameters()]
    out: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))
    return out


def _swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return (gate / (1 + (-gate).exp()) * (x @ w3.T)) @ w2.T


def _experts(fast: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """fast: by grouped products in bfloat16, as in training on CUDA; otherwise the loop over experts. With biases, the
    activation is that of gpt_oss."""
    function = grouped_feed_forward if fast and x.dtype == torch.bfloat16 else expert_loop
    counts = torch.tensor(EXPERT_ROWS, device=x.device)
    own = (weight.unflatten(0, (len(EXPERT_ROWS), -1)) for weight in weights)
    return function(x[0], counts, *own, activation=clamped_swiglu if len(weights) > 3 else swiglu)


def _loss(head: OutputLayer, labels: Tensor, recomputes: bool, x: Tensor, weight: Tensor) -> Tensor:
    """Share of each row in the mean loss, from titanlite's output layer."""
    head.computation = replace(head.computation, recomputes=recomputes)
    num_valid = (labels >= 0).sum().expand(len(labels))
    arguments = (x, labels.to(x.device), num_valid.to(x.device))
    out: Tensor = torch.func.functional_call(head, {"weight": weight}, arguments)
    return out


def _plain_loss(labels: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    scores = x @ weight.T
    own = scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, scores.logsumexp(-1) - own, 0).sum(1) / (labels >= 0).sum()


def unused_experts(setup: Setup) -> Found:
    """Gradients of the experts without rows, which no product computes, in memory that held NaN before."""
    dim, hidden = 64, 96
    counts = torch.tensor(EXPERT_ROWS)
    shapes = [(len(counts), *shape) for shape in ((hidden, dim), (dim, hidden), (hidden, dim))]
    weights = [torch.ones(shape, dtype=torch.bfloat16, device=setup.device, requires_grad=True) for shape in shapes]
    rows = torch.ones(sum(EXPERT_ROWS), dim, dtype=torch.bfloat16, device=setup.device)
    old = [torch.full_like(weight, torch.nan) for weight in weights]
    del old
    out = grouped_feed_forward(rows, counts.to(setup.device), *weights)
    gradients = torch.autograd.grad(out, weights, torch.ones_like(out))
    for index, gradient in enumerate(gradients, start=1):
        if gradient.cpu()[counts == 0].count_nonzero():  # NaN counts
            raise WrongError(f"the gradient of w{index} is not 0 for experts without rows")
    return Found("their gradients are 0")


def updates(section: OptimizerConfig, bound: float, setup: Setup) -> Found:
    """Three updates, the second one skipped, against those on the host in float64."""
    changes = []
    for device, dtype in ((torch.device("cpu"), torch.float64), (setup.device, torch.float32)):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(48, 64, generator=generator, dtype=torch.float64)
        block = nn.ParameterDict({"w": weight.to(device, dtype, copy=True)})
        named = {f"block.{name}": parameter for name, parameter in block.named_parameters()}
        own = replace(section, newton_schulz_dtype="auto") if dtype == torch.float64 else section
        optimizer = build_optimizer(own, named, Structure((), {"block": 0}, {}), device, ShardGroups(), 0)
        for step in range(3):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            block["w"].grad = gradient.to(device, dtype)
            optimizer.step_if(torch.tensor(step != 1, device=device))
        changes.append(block["w"].detach().cpu().double() - weight)
    expected, found = changes
    return require_errors({"update": difference(found, expected)}, {"update": bound})
