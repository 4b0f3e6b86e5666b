"""Mixtures of experts: the layer against loops over experts and a dense layer, and a step with and without ep.

The first table times forward and backward passes of a layer on random rows: titanlite's, with the products that it
chooses for the device and the dtype; the same with torch's grouped products, which are also its own choice in bfloat16
on CUDA; the loop of transformers, which looks up the positions of each expert, over a list of matrices per expert and
over stacked ones; the same of gpt-oss, with biases and the clamped SwiGLU, beside the module of transformers; and a
dense SwiGLU layer with the FLOPs of a position's experts. Only titanlite's layers count loads
and add the losses of the router. A round runs `--steps` passes of each layer, in one process and in an order that
alternates. On a CPU, the process has one thread and its CPU time counts; on a GPU, the time until the last kernel ends.

The second table times steps of qwen3_moe on two ranks, dp_shard 2 with ep 1 and with ep 2, which also alternate in the
same processes. With --device cuda, it needs two GPUs and is left out on one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measuring import (
    Row,
    build,
    configuration,
    in_turns,
    ratios,
    report,
    threads_per_process,
    use_device,
    wait_for_all,
)
from titanlite.models.experts import MixtureOfExperts, grouped_feed_forward, router_scores
from titanlite.models.gpt_oss import GPT_OSS
from titanlite.models.hugging_face import stored_tensors
from titanlite.models.layers import FeedForward
from titanlite.models.qwen3_moe import QWEN3_MOE
from titanlite.ranks.launch import run_ranks
from titanlite.runtime.errors import UsageError

Shape = tuple[int, int, int]
"""Number of experts, width of their hidden layers, experts of a position."""
SEQUENCES = 8
"""Of a step, in one microbatch on each of two ranks."""
MODEL = (
    *("model.family=qwen3_moe", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=64"),
    *(
        "model.vocab_size=1024",
        f"training.global_batch_size={SEQUENCES}",
        f"training.local_batch_size={SEQUENCES // 2}",
    ),
)


class Loop(nn.Module):
    """The mixture as transformers computes it in its "eager" form.

    gate_up: (2 hidden, dim) of each expert; down: (dim, hidden) of each.
    """

    def __init__(
        self,
        router: nn.Parameter,
        n_active: int,
        gate_up: nn.ParameterList | nn.Parameter,
        down: nn.ParameterList | nn.Parameter,
    ) -> None:
        super().__init__()
        self.router, self.n_active, self.gate_up, self.down = router, n_active, gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns the same shape."""
        rows = x.flatten(0, 1)
        weights, chosen = router_scores(rows, self.router).softmax(dim=-1).topk(self.n_active, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(rows)
        mask = functional.one_hot(chosen, len(self.router)).permute(2, 1, 0)  # (experts, n_active, rows)
        for index in mask.sum(dim=(1, 2)).nonzero().flatten().tolist():
            choice, position = torch.where(mask[index])
            gate, up = functional.linear(rows[position], self.gate_up[index]).chunk(2, dim=-1)
            result = functional.linear(functional.silu(gate) * up, self.down[index])
            out.index_add_(0, position, result * weights[position, choice, None])
        return out.view_as(x)


def build_layers(shape: Shape, dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """The layers of the first table. All mixtures have the same weights."""
    n_experts, hidden, n_active = shape
    torch.manual_seed(0)
    sizes = {"dim": dim, "ffn_dim": hidden, "n_experts": n_experts, "n_active_experts": n_active}
    config = replace(QWEN3_MOE.flavors["debug"], **sizes, balance_loss=0.0)
    with torch.device(device):
        titanlite, grouped = (MixtureOfExperts(config).to(dtype) for _ in range(2))
        dense = FeedForward(dim, n_active * hidden).to(dtype)
    for weight in titanlite.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    grouped.load_state_dict(titanlite.state_dict())
    grouped.experts.feed_forward = grouped_feed_forward
    router, experts = titanlite.router.weight.detach(), titanlite.experts
    gate_up, down = torch.cat((experts.w1, experts.w3), dim=1).detach(), experts.w2.detach()
    lists = [nn.ParameterList(nn.Parameter(matrix.clone()) for matrix in stacked) for stacked in (gate_up, down)]
    gpt_oss, theirs = gpt_oss_layers(sizes, dtype, device)
    return {
        "titanlite": titanlite,
        "titanlite, gpt-oss": gpt_oss,
        "transformers, gpt-oss": theirs,
        "titanlite, grouped products": grouped,
        "loop, list of matrices": Loop(nn.Parameter(router.clone()), n_active, *lists),
        "loop, stacked matrices": Loop(
            nn.Parameter(router.clone()), n_active, nn.Parameter(gate_up), nn.Parameter(down.clone())
        ),
        "dense": dense,
    }


def gpt_oss_layers(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Layers of gpt-oss with the same weights: titanlite's, and that of transformers."""
    # imported here: it takes seconds
    from transformers.models.gpt_oss import modeling_gpt_oss

    library: Any = modeling_gpt_oss

    config = replace(GPT_OSS.flavors["debug"], **sizes, balance_loss=0.0)
    fields = GPT_OSS.exported.config_json(config)
    with torch.device(device):
        ours = MixtureOfExperts(config, bias=True).to(dtype)
        theirs = library.GptOssMLP(library.GptOssConfig(**fields, experts_implementation="eager")).to(dtype)
    for weight in ours.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    named = {f"layers.0.feed_forward.{name}": weight.detach() for name, weight in ours.named_parameters()}
    stored = stored_tensors(named, GPT_OSS.exported.names(config))
    theirs.load_state_dict({name.removeprefix("model.layers.0.mlp."): weight for name, weight in stored.items()})
    return ours, theirs


def time_layers(
    shape: Shape, dim: int, tokens: int, dtype: str, rounds: int, steps: int, device_type: str
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a forward and backward pass of each layer in each round, see in_turns."""
    torch.set_num_threads(1)
    device = use_device(device_type)
    layers = build_layers(shape, dim, getattr(torch, dtype), device)
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(1, tokens, dim, generator=generator).to(device, getattr(torch, dtype)) for _ in range(2))
    x.requires_grad_()

    def run(layer: nn.Module) -> None:
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).backward(upstream)

    sides = {name: partial(run, layer) for name, layer in layers.items()}
    for side in sides.values():
        side()
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    return in_turns(sides, rounds, steps, wait)


def time_steps(
    layouts: Mapping[str, Sequence[str]], rounds: int, steps: int, threads: int, device_type: str
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of each layout, which is name -> settings, in each round on this rank, see in_turns."""
    torch.set_num_threads(threads)
    device = use_device(device_type)
    sides = {}
    for name, settings in layouts.items():
        trainer, batches = build(configuration(settings, dist.get_world_size(), device_type), device)
        sides[name] = partial(trainer.train_step, batches)
        for _ in range(2):
            sides[name]()
    return in_turns(sides, rounds, steps, partial(wait_for_all, device))


def layer_rows(shape: Shape, dim: int, tokens: int, dtype: str, rounds: int, steps: int, device_type: str) -> list[Row]:
    (found,) = run_ranks(time_layers, 1, shape, dim, tokens, dtype, rounds, steps, device_type, timeout_s=3600)
    name, which = ("time (ms)", 0) if device_type == "cuda" else ("CPU (ms)", 1)
    seconds = {layer: [times[which] for times in found[layer]] for layer in found}
    return [
        {
            "experts": label(shape),
            "layer": layer,
            name: [1000 * value for value in values],
            "time / titanlite": ratios(values, seconds["titanlite"]),
            "time / dense": ratios(values, seconds["dense"]),
        }
        for layer, values in seconds.items()
    ]


def step_rows(shape: Shape, dim: int, tokens: int, dtype: str, rounds: int, steps: int, device_type: str) -> list[Row]:
    n_experts, hidden, n_active = shape
    model = (f"model.n_experts={n_experts}", f"model.ffn_dim={hidden}", f"model.n_active_experts={n_active}")
    sizes = (f"model.dim={dim}", f"training.seq_len={tokens // SEQUENCES}", f"training.mixed_precision_param={dtype}")
    layouts = {f"ep {ep}": (*MODEL, *model, *sizes, "parallelism.dp_shard=2", f"parallelism.ep={ep}") for ep in (1, 2)}
    ranks = run_ranks(time_steps, 2, layouts, rounds, steps, threads_per_process(2), device_type, timeout_s=3600)
    elapsed = {layout: [times[0] for times in ranks[0][layout]] for layout in layouts}
    worked = {
        layout: [one[1] + other[1] for one, other in zip(*(rank[layout] for rank in ranks), strict=True)]
        for layout in layouts
    }
    rows: list[Row] = []
    for layout in layouts:
        row: dict[str, str | float | Sequence[float]] = {
            "experts": label(shape),
            "layout": f"dp_shard 2, {layout}",
            "step (ms)": [1000 * value for value in elapsed[layout]],
            "step / ep 1": ratios(elapsed[layout], elapsed["ep 1"]),
        }
        if device_type == "cpu":
            row["CPU of both ranks / ep 1"] = ratios(worked[layout], worked["ep 1"])
        rows.append(row)
    return rows


def label(shape: Shape) -> str:
    n_experts, hidden, n_active = shape
    return f"{n_active} of {n_experts} x {hidden}"


def main(
    shapes: tuple[Shape, ...] = ((8, 256, 2), (64, 64, 8)),
    dim: int = 256,
    tokens: int = 2048,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 7,
    steps: int = 2,
    device: Literal["cpu", "cuda"] = "cpu",
    json: Path | None = None,
) -> None:
    """shapes: number of experts, their width (a multiple of 8), and the experts of a position, for each. tokens: of a
    pass and of a step, a multiple of 8. dtype: of the computation. json: folder of experts.json."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        raise UsageError("--device cuda needs a GPU, and torch finds none: leave it out to measure on CPUs")
    if tokens < SEQUENCES or tokens % SEQUENCES:
        raise UsageError(f"--tokens {tokens}: set a multiple of {SEQUENCES}, the sequences of a step")
    sizes = (dim, tokens, dtype, rounds, steps, device)
    tables = {"Forward and backward pass of a layer": [row for shape in shapes for row in layer_rows(shape, *sizes)]}
    if device == "cpu" or gpus > 1:
        tables["Training step on two ranks"] = [row for shape in shapes for row in step_rows(shape, *sizes)]
    report("experts", tables, json)
