"""Every layout has the weights of one process after three updates by Muon and AdamW; planted mistakes are seen.

With -s, prints the errors of docs/layouts.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.gradients import build_on_mesh, difference, full_tensor, local_batches
from tests.distributed.layouts import (
    BASE,
    COMPILE,
    EP,
    EXPERTS,
    FOUR_KV_HEADS,
    FULL,
    GATHER,
    GEMMA2,
    GPT_OSS,
    MISTRAL,
    PAIRS,
    QWEN2,
    TIED,
    Layout,
    depth,
    is_supported,
    schedule,
)
from tests.distributed.mistakes import Around, Planted
from tests.distributed.reference import backward, global_batch, plain_model
from tests.pool import run_ranks
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.models.attention import attend
from titanlite.models.layers import Attention
from titanlite.models.parts import Transfer
from titanlite.optim import groups, muon
from titanlite.optim.muon import POLAR_EXPRESS, Muon, scale_rows_
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.owners import Matrix, Owners
from titanlite.optim.qk_clip import QKClip, attentions_of
from titanlite.runtime.torch_internals import local_part
from titanlite.trainer import Trainer

STEPS = 3
BOUND = 1e-11
"""AdamW of biases of keys, whose gradients are nearly 0, has the largest errors, 1e-12."""
LR, DECAY, START, MOMENTUM = 0.02, 0.1, 0.7, 0.9
SETTINGS = (
    *("optimizer.name=Muon", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}"),
    *(f"optimizer.momentum={MOMENTUM}", "training.max_norm=0", f"training.steps={STEPS}"),
    *("optimizer.weight_decay_end=0", f"optimizer.momentum_start={START}", "optimizer.momentum_steps=4"),
)
BETA2 = 0.8
NORMUON = (
    *(f"optimizer.normuon_beta2={BETA2}", "optimizer.orthogonalization=polar_express"),
    "optimizer.cautious_weight_decay=true",
)
QK_CLIP = ("optimizer.qk_clip=0.045",)
"""Below the scores of some heads only, in the first step."""
LAYOUTS = (
    Layout((1, 1, 1, 1), EXPERTS),
    Layout((1, 1, 1, 1), (*EXPERTS, *NORMUON)),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP, *NORMUON)),
    Layout((1, 2, 1, 1), accumulation=2),
    Layout((1, 1, 1, 2), (*EXPERTS, *BASE, *NORMUON)),
    Layout((2, 1, 1, 1), (*EXPERTS, *BASE, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS)),
    Layout((1, 1, 1, 1), (*EXPERTS, *BASE, *EP), cp=2),
    Layout((1, 1, 1, 1), QK_CLIP),
    Layout((1, 2, 1, 1), (*QWEN2, *QK_CLIP), accumulation=2),
    Layout((1, 1, 1, 2), (*QWEN2, *FOUR_KV_HEADS, *QK_CLIP)),
    Layout((2, 1, 1, 1), (*schedule("ZBVZeroBubble"), *depth(3), *PAIRS, *QK_CLIP)),
    Layout((1, 1, 1, 1), (*MISTRAL, *QK_CLIP), cp=2),
)
"""One and two ranks, in the default suite."""
SOAK = (
    Layout((1, 1, 4, 1)),
    Layout((1, 1, 4, 1), (*EXPERTS, *EP)),
    Layout((1, 4, 1, 1), NORMUON),
    Layout((1, 1, 1, 4), ("model.n_kv_heads=4",)),
    Layout((1, 1, 3, 1), (*EXPERTS, "parallelism.ep=3"), streams=8),
    Layout((1, 2, 1, 2), NORMUON),
    Layout((1, 1, 2, 2), (*TIED, *BASE, *NORMUON)),
    Layout((1, 2, 2, 1), (*EXPERTS, *EP, *FULL, *NORMUON)),
    Layout((2, 2, 1, 1), (*schedule("Interleaved1F1B"), *NORMUON)),
    Layout((2, 1, 1, 2), (*GEMMA2, *TIED, *BASE, *schedule("1F1B"), *PAIRS)),
    Layout((1, 1, 2, 1), (*GATHER, *TIED), cp=2),
    Layout((1, 1, 1, 2), cp=2),
    Layout((1, 2, 1, 1), EXPERTS, cp=2),
    Layout((1, 1, 2, 2), (*GPT_OSS, *BASE, *EP)),
    Layout((1, 2, 2, 2)),
    Layout((2, 1, 2, 2), (*EXPERTS, *EP, *schedule("1F1B"), *PAIRS, *NORMUON)),
    Layout((1, 1, 2, 2), (*EXPERTS, "model.n_experts=8", "parallelism.ep=4", *NORMUON), cp=2),
    Layout((2, 2, 2, 1), schedule("ZBVZeroBubble")),
    Layout((1, 1, 3, 1), (*GPT_OSS, "optimizer.qk_clip=0.075"), streams=8),
    Layout((1, 1, 2, 2), (*FOUR_KV_HEADS, *FULL, *COMPILE, *QK_CLIP)),
    Layout((1, 1, 2, 1), (*GATHER, *MISTRAL, *QK_CLIP), cp=2),
    Layout((2, 1, 2, 2), (*QWEN2, *FOUR_KV_HEADS, *schedule("1F1B"), *PAIRS, *QK_CLIP)),
)
"""Three to eight ranks."""


def is_muons(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and decays(name, parameter) and "router" not in name


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not name.endswith("bias")


def factors(config: JobConfig, name: str, parameter: Tensor) -> tuple[float, float]:
    """Factors of the learning rate and of AdamW's eps with a base model, from the names in docs/optimizers.md."""
    model = config.hyper_parameters
    if not model.base_dim:
        return 1.0, 1.0
    width, layers = model.dim / model.base_dim, model.base_layers / model.n_layers
    growth = math.sqrt(width) if config.model.family == "gemma2" else 1.0
    if name == "tok_embeddings.weight":
        return 1 / growth, growth / width
    if name == "norm.weight":
        return (growth / width, 1 / growth) if model.tie_embeddings else (1.0, 1 / width)
    if name == "output.weight":
        return 1 / width, 1.0
    if name.endswith("router.weight"):
        return 1 / width, layers
    ends = ("post_norm.weight",) if model.norms != "before" else ("wo.weight", "wo.bias", "w2.weight", ".w2", "w2_bias")
    scale = layers if name.endswith(ends) else 1.0
    return scale * (width**-0.5 if is_muons(name, parameter) else 1.0), layers / width / scale


def orthogonalized(matrix: Tensor, *, is_polar: bool) -> Tensor:
    """Five iterations of a matrix, of its transpose if it is tall."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.square().sum().sqrt() / (1.01 if is_polar else 1)
    for a, b, c in POLAR_EXPRESS[:5] if is_polar else [(3.4445, -4.775, 2.0315)] * 5:
        x = x / 1.01 if is_polar else x
        gram = x @ x.mT
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def decay_(weights: Tensor, before: Tensor, update: Tensor, decay: float, *, is_cautious: bool) -> None:
    """Add the weight decay of a step. update: of another sign than the change of the weights."""
    weights.sub_(LR * decay * before * (update * before >= 0 if is_cautious else 1))


@contextmanager
def scores_of(model: nn.Module) -> Iterator[dict[Attention, Tensor]]:
    """The largest score of each head in the forward passes inside, from the full matrix of scores."""
    found: dict[Attention, Tensor] = {}

    def noting(attention: Attention, queries: Tensor, keys: Tensor, *others: Any, **options: Any) -> Tensor:
        groups = queries.shape[1] // keys.shape[1]
        scores = queries @ keys.repeat_interleave(groups, dim=1).mT / queries.shape[-1] ** 0.5
        places = torch.arange(queries.shape[2])
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (options.get("window") or len(places)))
        found[attention] = scores.detach().masked_fill(~seen, -torch.inf).amax((0, 2, 3))
        return attend(queries, keys, *others, **options)

    for attention in attentions_of([model]):
        attention.attend = partial(noting, attention)
    yield found


def clip_(scores: Mapping[Attention, Tensor], threshold: float) -> None:
    """QK-clip of all heads, one after the other."""
    for attention, of_heads in scores.items():
        width, is_grouped = attention.head_dim, len(attention.wq.weight) != len(attention.wk.weight)
        for head, score in enumerate(of_heads.tolist()):
            rows, factor = slice(head * width, (head + 1) * width), min(threshold / score, 1) if score > 0 else 1
            for parameter in attention.wq.parameters():
                parameter[rows] *= factor if is_grouped else math.sqrt(factor)
            for parameter in () if is_grouped else attention.wk.parameters():
                parameter[rows] *= math.sqrt(factor)


def expected_weights(config: JobConfig, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(initial, updated) weights of one process in plain torch."""
    model = plain_model(config)
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    others = [(name, parameter) for name, parameter in named.items() if not is_muons(name, parameter)]
    rest = [parameter for name, parameter in others if decays(name, parameter)]
    own = {name: factors(config, name, parameter) for name, parameter in named.items()}
    factored = [
        {"params": [parameter], "lr": LR * own[name][0], "eps": 1e-8 * own[name][1]} for name, parameter in others
    ]
    adamw = torch.optim.AdamW(factored, betas=(0.9, 0.95), weight_decay=0.0)
    is_cautious, has_squares = config.optimizer.cautious_weight_decay, config.optimizer.normuon_beta2 != -1
    squares = {name: torch.zeros_like(value[..., :1]) for name, value in before.items()}
    momentum = {name: torch.zeros_like(value) for name, value in before.items()}
    for step in range(STEPS):
        decay = DECAY * (1 - (step + 1) / STEPS)
        share = START + (MOMENTUM - START) * min((step + 1) / 4, 1)
        model.zero_grad()
        with scores_of(model) as scores:
            backward(model, config, global_batch("silent_ranks", step, rows), step + 1)
        earlier = [parameter.detach().clone() for parameter in rest]
        adamw.step()
        with torch.no_grad():
            for parameter, old in zip(rest, earlier, strict=True):
                decay_(parameter, old, old - parameter, decay, is_cautious=is_cautious)
        for name, parameter in named.items():
            if not is_muons(name, parameter):
                continue
            assert parameter.grad is not None
            momentum[name].lerp_(parameter.grad, 1 - share)
            direction = parameter.grad.lerp(momentum[name], share)
            stack = direction if direction.dim() == 3 else direction[None]
            is_polar = config.optimizer.orthogonalization == "polar_express"
            found = torch.stack([orthogonalized(matrix, is_polar=is_polar) for matrix in stack]).view_as(parameter)
            if has_squares:
                squares[name] = BETA2 * squares[name] + (1 - BETA2) * found.square().mean(-1, keepdim=True)
                scaled = found / (squares[name].sqrt() + 1e-10)
                norms_of = [each.square().sum((-2, -1), keepdim=True).sqrt() for each in (found, scaled)]
                found = scaled * (norms_of[0] / norms_of[1])
            factor = LR * own[name][0] * 0.2 * math.sqrt(max(parameter.shape[-2:]))
            old = parameter.detach().clone()
            with torch.no_grad():
                parameter.sub_(factor * found)
                decay_(parameter, old, found, decay, is_cautious=is_cautious)
        if threshold := config.optimizer.qk_clip:
            assert step > 0 or {False, True} == set((torch.cat([*scores.values()]) > threshold).tolist())
            with torch.no_grad():
                clip_(scores, threshold)
    return before, {name: parameter.detach() for name, parameter in named.items()}


_expected: dict[tuple[str, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}


def errors(layout: Layout) -> dict[str, float]:
    """The error of each parameter's change, relative to it, on the ranks that have the parameter."""
    config = layout.config(*SETTINGS)
    key = repr((config.model, config.optimizer)), layout.rows
    if key not in _expected:
        _expected[key] = expected_weights(config, layout.rows)
    before, after = _expected[key]
    trainer, mesh = build_on_mesh(config)
    for step in range(STEPS):
        trainer.train_step(local_batches(config, mesh, global_batch("silent_ranks", step, layout.rows)))
    found = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            change = full_tensor(parameter.detach()) - before[name]
            found[name] = difference(change, after[name] - before[name])
    return found


def errors_of(layouts: Sequence[Layout], mistakes: Sequence[str]) -> list[float]:
    """The largest error of each layout, with the mistake planted."""
    found = []
    for layout, name in zip(layouts, mistakes, strict=True):
        with MISTAKES[name]():
            found.append(max(errors(layout).values()))
    return found


@pytest.mark.parametrize(
    ("world_size", "table"),
    [
        (1, LAYOUTS),
        pytest.param(2, LAYOUTS, marks=pytest.mark.slow),
        *(pytest.param(size, SOAK, marks=pytest.mark.soak) for size in (3, 4, 8)),
    ],
)
def test_weights_are_those_of_one_process(world_size: int, table: Sequence[Layout]) -> None:
    layouts = [layout for layout in table if layout.world_size == world_size and is_supported(layout)]
    ranks = run_ranks(errors_of, world_size, layouts, [""] * len(layouts))
    for layout, *found in zip(layouts, *ranks, strict=True):
        print(f"| {layout.name} | {layout.schedule} | {layout.other} | {max(found):.1e} |")
        assert max(found) < BOUND, layout


def local_orthogonalization() -> Planted:
    """Each rank orthogonalizes its own part of a matrix."""

    def apply(
        self: Owners,
        part: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[Matrix, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        del dtype
        for matrices in self.rounds:
            for matrix in matrices:
                if matrix.division.parts[self.rank] is not None:
                    use(matrix, function(part(matrix)))

    return patch.object(Owners, "apply", apply)


def stale_owner() -> Planted:
    """The last rank returns the results of its first update in all later ones."""
    kept: dict[int, Tensor] = {}
    original = Owners.apply

    def apply(self: Owners, part: object, function: Callable[[Tensor], Tensor], use: object, dtype: object) -> None:
        calls = iter(range(1000))

        def stale(matrix: Tensor) -> Tensor:
            number = next(calls)
            is_stale = dist.get_rank() == dist.get_world_size() - 1
            return kept.setdefault(number, function(matrix)) if is_stale else function(matrix)

        original(self, part, stale, use, dtype)  # type: ignore[arg-type]

    return patch.object(Owners, "apply", apply)


def momentum_of_each_replica() -> Planted:
    """The gradients of the last rank are others than those of its replica, as if they were not reduced."""
    original = Muon.step

    def step(self: Muon) -> None:
        for parameter, _ in self.each():
            if dist.get_rank() == dist.get_world_size() - 1:
                gradient = local_part(parameter.grad)
                gradient.mul_(torch.linspace(0, 2, gradient.shape[-1]))
        original(self)

    return patch.object(Muon, "step", step)


def no_row_norms() -> Planted:
    """The mean squares of rows do not reach the owners, which scale by those of this step."""

    def scale(matrix: Tensor, squares: Tensor, beta2: float) -> Tensor:
        return scale_rows_(matrix, torch.zeros_like(squares), beta2)

    return patch.object(muon, "scale_rows_", scale)


def decay_twice() -> Planted:
    original = Muon.step

    def step(self: Muon) -> None:
        original(self)
        for parameter, group in self.each():
            local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"])

    return patch.object(Muon, "step", step)


def width(change: Callable[[Transfer], float]) -> Planted:
    """Another factor of the learning rate of hidden matrices with a base model, relative to the right one."""
    original = groups.lr_factor

    def factor(section: OptimizerConfig, optimizer: str, transfer: Transfer) -> float:
        return original(section, optimizer, transfer) * (change(transfer) if transfer.is_hidden else 1)

    return patch.object(groups, "lr_factor", factor)


def scores_of_each_rank() -> Planted:
    """Each data rank clips by the scores of its own rows."""
    original = QKClip.clip_if

    def clip_if(self: QKClip, ok: Tensor, *, counts: bool) -> Tensor:
        with patch.object(dist, "all_reduce", lambda *_, **__: None):
            return original(self, ok, counts=counts)

    return patch.object(QKClip, "clip_if", clip_if)


def scores_of_last_microbatch() -> Planted:
    original = Trainer.forward_backward

    def forward_backward(self: Trainer, batch: Batch, num_valid: Tensor) -> Tensor:
        assert self.qk_clip is not None
        self.qk_clip.start_step()
        return original(self, batch, num_valid)

    return patch.object(Trainer, "forward_backward", forward_backward)


MISTAKES: dict[str, Around] = {
    "": nullcontext,
    "local orthogonalization": local_orthogonalization,
    "stale owner": stale_owner,
    "momentum of each replica": momentum_of_each_replica,
    "owner without row norms": no_row_norms,
    "decay twice": decay_twice,
    "width applied twice": partial(width, lambda transfer: transfer.width**-0.5),
    # of wo and w2 with tp 2, which have the scale of the residual branch, ranks have half of the inputs
    "width of the shard": partial(width, lambda transfer: 2**0.5 if transfer.scale != 1 else 1.0),
    "scores of each data rank": scores_of_each_rank,
    "scores of the last microbatch": scores_of_last_microbatch,
}
PLANTED = (
    ("local orthogonalization", Layout((1, 1, 2, 1))),
    ("stale owner", Layout((1, 1, 2, 1))),
    ("momentum of each replica", Layout((1, 2, 1, 1))),
    ("owner without row norms", Layout((1, 1, 2, 1), NORMUON)),
    ("decay twice", Layout((1, 1, 2, 1))),
    ("width applied twice", Layout((1, 1, 2, 1), BASE)),
    ("width of the shard", Layout((1, 1, 1, 2), BASE)),
    ("scores of each data rank", Layout((1, 2, 1, 1), QK_CLIP)),
    ("scores of the last microbatch", Layout((1, 2, 1, 1), QK_CLIP, accumulation=2)),
)
SOAK_PLANTED = (("local orthogonalization", Layout((1, 1, 1, 2))), ("stale owner", Layout((1, 2, 1, 1))))


@pytest.mark.slow
@pytest.mark.parametrize("planted", [PLANTED, pytest.param(SOAK_PLANTED, marks=pytest.mark.soak)])
def test_planted_mistakes_are_seen(planted: Sequence[tuple[str, Layout]]) -> None:
    names, layouts = zip(*planted, strict=True)
    ranks = run_ranks(errors_of, 2, layouts, names)
    for name, layout, *found in zip(names, layouts, *ranks, strict=True):
        print(f"| {name} | {layout.name} | {max(found):.1e} |")
        assert max(found) > 1e-3, name
