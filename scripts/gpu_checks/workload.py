"""Where the checks run, their models and batches, and the float64 reference of a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_checks.rows import WrongError
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import IGNORE_INDEX, Batch, StepStats, rows_and_tokens
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.forward import on_device
from titanlite.models.attention import pin_kernels
from titanlite.models.experts import mixtures_of
from titanlite.models.family import resolve_model
from titanlite.models.init import local_region
from titanlite.models.losses import LOSSES
from titanlite.parallel.mesh import Mesh
from titanlite.planning.hardware.calibration import Clock
from titanlite.ranks.distributed import World
from titanlite.ranks.network import connect, init_process_group
from titanlite.runtime.torch_internals import TorchDispatchMode, clear_sharding_cache
from titanlite.tools.parity.measure import full_tensor, named_parameters
from titanlite.tools.parity.reference import forward_backward, objective_of, plain_model
from titanlite.trainer import Trainer

BOUNDS = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 0.05}
"""Largest relative error of a gradient, by compute dtype: in float32 about 1,000 roundings of 2^-24, in bfloat16 about
12 of 2^-8. A wrong scale, a missing microbatch or a mask in the wrong place exceeds each of them."""


@dataclass(frozen=True)
class Setup:
    """The device, the size of the models, and the folder of the report."""

    device_type: str
    tiny: bool
    folder: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def most_ranks(self) -> int:
        """Ranks that can run at the same time: NCCL needs a GPU for each."""
        return torch.cuda.device_count() if self.device_type == "cuda" else 2

    @property
    def backend(self) -> str:
        """Backend of torch.compile. On a CPU, inductor's C++ compiler takes longer than all checks together."""
        return "inductor" if self.device_type == "cuda" else "aot_eager"

    def synchronize(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of a call, the fastest of several rounds."""
        return Clock(self.device, None).seconds(work)


class Operations(TorchDispatchMode):
    """Inside, all operations of this thread, with the shapes of their tensors, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((str(func), [arg.shape for arg in args if isinstance(arg, Tensor)]))
        return func(*args, **(kwargs or {}))


UNFUSED = ("aten._softmax", "aten.bmm", "aten.baddbmm", "aten._scaled_dot_product_attention_math")
"""Operations of an attention that materializes all scores, by their first letters."""


def fused_kernel(run: Callable[[], object], also: Sequence[str] = ()) -> str:
    """Names of the fused operations of attention that a call runs, with those of `also`, which it notes. Raises
    WrongError if there is none, or an operation that materializes all scores."""
    with Operations() as operations:
        run()
    names = [name for name, _ in operations.found]
    fused = [name for name in names if name.startswith("aten._scaled_dot_product_") and not name.startswith(UNFUSED)]
    if plain := [name for name in names if name.startswith(UNFUSED)]:
        raise WrongError(f"not a fused kernel, but {', '.join(dict.fromkeys(plain))}")
    if not fused and not also:
        raise WrongError("no fused operation")
    return ", ".join(dict.fromkeys([*also, *fused])).replace("aten._scaled_dot_product_", "").replace(".default", "")


def matmul_flops(setup: Setup) -> float:
    """FLOP/s of a bfloat16 product of random matrices of 8192 x 8192 (tiny: 256 x 256)."""
    size = 256 if setup.tiny else 8192
    left, right = (torch.randn(size, size, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / setup.seconds(lambda: left @ right)


EXPERTS = ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "olmoe", "gpt_oss", "deepseek_v3")
"""Families with experts. Compared in float64 only: in lower precision, near ties choose other experts."""

HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with gated linear attention."""


def small_model(setup: Setup, family: str) -> list[str]:
    """Shape of the models that are compared with float64. On CUDA the heads are as wide as those of the 8B."""
    sizes = {"dim": 512, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 1024, "vocab_size": 1031}
    seq_len, head_dim = 256, 128
    if setup.tiny:
        sizes |= {"dim": 64, "ffn_dim": 96, "vocab_size": 131}
        seq_len, head_dim = 32, 16
    if family.startswith(("gemma", "gpt_oss", "mistral", "qwen3")):  # that of the others is dim / n_heads
        sizes["head_dim"] = head_dim
    if family in ("gemma2", "gemma3", "gpt_oss", "mistral", "olmo3"):
        sizes["sliding_window"] = seq_len // 3
    if family in ("gemma2", "gemma3", "gpt_oss", "olmo3", *HYBRID):
        sizes["full_interval"] = 2
    if family in EXPERTS:
        sizes |= {"n_experts": 8, "n_active_experts": 2}
    if family in HYBRID:
        sizes |= {"linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": head_dim}
        sizes |= {"linear_value_dim": head_dim}
    if family == "deepseek_v3":
        sizes |= {"n_kv_heads": 4, "n_dense_layers": 1, "dense_ffn_dim": sizes["ffn_dim"], "n_groups": 4}
        sizes |= {"n_active_groups": 2, "q_lora_rank": sizes["dim"] // 2, "kv_lora_rank": sizes["dim"] // 4}
        sizes |= {"qk_nope_head_dim": head_dim, "qk_rope_head_dim": head_dim // 2, "v_head_dim": head_dim}
        sizes["n_further_tokens"] = 1
    return [
        f"model.family={family}",
        *(f"model.{key}={value}" for key, value in sizes.items()),
        f"training.seq_len={seq_len}",
    ]


def configure(setup: Setup, *settings: str, world_size: int = 1) -> JobConfig:
    """The configuration of these settings, `section.key=value`; a later one replaces an earlier one."""
    base = ("data.sources.0.kind=tokens", "data.sources.0.path=unused.npy", "lr_schedule.warmup_steps=0")
    values = dict(setting.split("=", 1) for setting in (*base, "lr_schedule.decay=none", *settings))
    arguments = [f"--{key}={value}" for key, value in values.items()]
    return load_config(arguments, world_size=world_size, device_type=setup.device_type, checks_files=False)


def dtypes(name: str) -> list[str]:
    """Settings of a compute dtype; bfloat16 has float32 weights and reductions, as in training."""
    stored = "float32" if name == "bfloat16" else name
    keys = {"dtype": stored, "mixed_precision_param": name, "mixed_precision_reduce": stored}
    return [f"training.{key}={value}" for key, value in keys.items()]


def compiled(setup: Setup) -> list[str]:
    return ["compile.enable=true", f"compile.backend={setup.backend}"]


def random_batch(config: JobConfig, rows: int, *, seed: int = 0, documents: Sequence[int] = ()) -> Batch:
    """Random rows on the host; each row has another share of valid labels, the first none.

    documents: lengths of the documents of a row, repeated and shifted by row; () for rows without documents.
    """
    vocab_size = resolve_model(config.model)[1].vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, config.training.seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    share = torch.linspace(0.0, 1.0, rows).unsqueeze(1) if rows > 1 else torch.full((1, 1), 0.5)
    labels[torch.rand(labels.shape, generator=generator) >= share] = IGNORE_INDEX
    positions = None
    if documents:
        positions = torch.stack([_positions(config.training.seq_len, documents, row) for row in range(rows)])
        labels[:, :-1][positions[:, 1:] == 0] = IGNORE_INDEX
    numbers = torch.arange(seed * rows, (seed + 1) * rows)
    return Batch(tokens[:, :-1].contiguous(), labels, numbers, torch.zeros_like(numbers), positions)


def _positions(seq_len: int, lengths: Sequence[int], shift: int) -> Tensor:
    edges, index = [0], shift
    while edges[-1] < seq_len:
        edges.append(min(seq_len, edges[-1] + lengths[index % len(lengths)]))
        index += 1
    return torch.cat([torch.arange(end - start) for start, end in pairwise(edges)])


def split(batch: Batch, parts: int, rank: int = 0, degree: int = 1) -> list[Batch]:
    """The microbatches of a data rank: rows n with n mod degree == rank, in order."""
    local = [tensor[rank::degree] for tensor in batch if tensor is not None]
    return [Batch(*tensors) for tensors in zip(*(tensor.chunk(parts) for tensor in local), strict=True)]


@contextmanager
def one_rank(setup: Setup) -> Iterator[None]:
    """The process group of one rank, and the kernels of attention, as in training."""
    clear_sharding_cache()  # which refers to meshes of an earlier group
    pin_kernels(setup.device)
    world = World(0, 0, 1, setup.device_type)
    comm = configure(setup).comm
    init_process_group(world, connect(world, comm), comm)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(setup: Setup, config: JobConfig, *, draws_weights: bool = True) -> Trainer:
    """The trainer of one rank, as in training. draws_weights: False fills them on the device, which is faster."""
    mesh = Mesh(config.parallelism, World(0, 0, 1, setup.device_type))
    mesh.connect(config.comm)
    model = build_model(config, mesh, setup.device, draws_weights=draws_weights)
    trainer = build_trainer(job_of(config, mesh.world.size), model, mesh, setup.device)
    if not draws_weights:
        fill_(trainer)
    return trainer


@torch.no_grad()
def fill_(trainer: Trainer) -> None:
    """Fill the weights with plausible values: norms 1, matrices normal."""
    for _, parameter in named_parameters(trainer):
        local = local_region(parameter)[0]
        local.normal_(std=0.02) if parameter.dim() > 1 else local.fill_(1.0)


def on_this_device(trainer: Trainer, batches: Sequence[Batch]) -> list[Batch]:
    return [on_device(batch, trainer.device) for batch in batches]


def take_step(trainer: Trainer, batches: Sequence[Batch]) -> StepStats:
    return trainer.train_step(on_this_device(trainer, batches))


@dataclass(frozen=True)
class Reference:
    """Mean loss and gradients of a batch with the initial weights, in float64 on the host."""

    loss: float
    gradients: dict[str, Tensor]


_references: dict[tuple[str, int, bool], Reference] = {}


def reference(config: JobConfig, batch: Batch) -> Reference:
    """The reference of a step, by plain torch and none of the trainer's code. Cached by model and kind of batch."""
    key = (repr(config.model), int(batch.sequences[0]), batch.positions is not None)
    if key not in _references:
        model = plain_model(config)
        for mixture in mixtures_of([model]):
            mixture.start_step(*rows_and_tokens([batch]))
        weight = config.loss.further_tokens_weight if model.predicts_further else 0.0
        objective = objective_of(LOSSES[config.loss.name], [batch], weight)
        loss = forward_backward(model, batch, objective, config.debug.seed, 1)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        _references[key] = Reference(loss, gradients)
    return _references[key]


def step_errors(trainer: Trainer, loss: Tensor, expected: Reference) -> dict[str, float]:
    """Relative errors of a step: of the loss, and of the gradient that is furthest off."""
    errors = {}
    for name, parameter in named_parameters(trainer):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        errors[name] = difference(full_tensor(gradient.detach()), expected.gradients[name])
    worst = max(errors, key=lambda name: errors[name])
    return {"loss": abs(loss.item() / expected.loss - 1), f"gradient of {worst}": errors[worst]}


def difference(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected|| in float64 on the host; infinity for NaN."""
    value, expected = value.detach().cpu().double(), expected.detach().cpu().double()
    error = (torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected)).item()
    return error if error == error else float("inf")
