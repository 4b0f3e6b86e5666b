"""Table of the verified layouts, and their errors in two steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.gradients import build_on_mesh, compare, difference, has_weights, local_batches
from tests.distributed.reference import global_batch, plain_model, reference_step, small_config
from tests.plain_loss import cross_entropy_by_row, further_term
from titanlite.config.schema import JobConfig
from titanlite.data.deal import most_sequences
from titanlite.parallel.mesh import AXES, DATA_AXES, PARAMETER_AXES
from titanlite.parallel.pipeline import SCHEDULES

BOUNDS = {"float64": 1e-11, "float32": 1e-5}
STEPS = 2
LEARNING_RATE = 5.0


@dataclass(frozen=True)
class Layout:
    """A mesh and other settings.

    axes: pp, dp_replicate, dp_shard, tp. settings: `section.key=value`. accumulation: local batches in an optimizer
    step. rows: sequences in an optimizer step. cp: degree of context parallelism. streams: data.num_streams, 0 for one
    per row.
    """

    axes: tuple[int, int, int, int]
    settings: tuple[str, ...] = ()
    accumulation: int = 1
    rows: int = 16
    cp: int = 1
    streams: int = 0

    @property
    def world_size(self) -> int:
        return math.prod(self.axes) * self.cp

    @property
    def degrees(self) -> tuple[int, ...]:
        """In the order of AXES."""
        degrees = dict(zip(PARAMETER_AXES, self.axes, strict=True)) | {"cp": self.cp}
        return tuple(degrees[axis] for axis in AXES)

    @property
    def name(self) -> str:
        degrees = [f"cp {self.cp}"] * (self.cp > 1) + [text.replace("=", " ") for text in self.settings if text in EPS]
        return ", ".join([" x ".join(map(str, self.axes)), *(text.removeprefix("parallelism.") for text in degrees)])

    @property
    def schedule(self) -> str:
        """Pipeline schedule; "" without a pipeline."""
        chosen = [text.partition("=")[2] for text in self.settings if text.startswith("parallelism.pp_schedule=")]
        return "" if self.axes[0] == 1 else (*chosen, "1F1B")[0]

    @property
    def other(self) -> str:
        """Short names of all settings except the mesh and the schedule."""
        chosen = [text for text in self.settings if "pp_schedule" not in text and text not in IMPLIED]
        chosen = [SHORT.get(text, text.partition(".")[2]) for text in chosen]
        uneven = [f"{self.rows} sequences of {self.streams} streams"] * (self.streams > 0)
        return ", ".join(
            [*(f"accumulation {self.accumulation}" for _ in range(self.accumulation > 1)), *uneven, *chosen]
        )

    def config(self, *settings: str) -> JobConfig:
        degrees = dict(zip(AXES, self.degrees, strict=True))
        streams = self.streams or self.rows
        most = most_sequences(self.rows, streams, math.prod(degrees[axis] for axis in DATA_AXES))
        return small_config(
            self.world_size,
            *(f"parallelism.{axis}={degree}" for axis, degree in degrees.items()),
            f"training.global_batch_size={self.rows}",
            f"training.local_batch_size={-(-most // self.accumulation)}",
            f"data.num_streams={streams}",
            "loss.z_loss=0",  # the reference has none; olmo2 and olmo3 would
            *self.settings,
            *settings,
        )


AOT = "compile.backend=aot_eager"
COMPILE = ("compile.enable=true", AOT)
FULL = ("activation_checkpoint.mode=full",)
BY_OP = ("activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=op")
BY_LAYER = ("activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=layer")
QWEN3 = ("model.family=qwen3", "model.head_dim=16")  # its heads are twice as wide as the residual stream
EXPERTS = (
    *("model.family=qwen3_moe", "model.head_dim=16", "model.n_experts=6", "model.n_active_experts=2"),
    *("model.balance_loss=0.5", "model.z_loss=0.1"),
)
OLMOE = ("model.family=olmoe", *EXPERTS[2:])
MISTRAL = ("model.family=mistral", "model.head_dim=16", "model.sliding_window=5")
OLMO3 = ("model.family=olmo3", *MISTRAL[2:], "model.full_interval=2", "model.rope_scaling_factor=4.0")
QWEN2 = ("model.family=qwen2",)
OLMO2 = ("model.family=olmo2",)
GEMMA = (*MISTRAL[1:], "model.full_interval=2", "model.query_pre_attn_scalar=20", "model.logit_cap=2.0")
GEMMA2 = ("model.family=gemma2", *GEMMA, "model.score_cap=0.2")
GEMMA3 = ("model.family=gemma3", *GEMMA, "model.rope_local_theta=100.0", "model.rope_scaling_factor=8.0")
GPT_OSS = ("model.family=gpt_oss", *EXPERTS[1:], *MISTRAL[2:], "model.full_interval=2")
SMOLLM3 = ("model.family=smollm3", "model.no_rope_interval=2")
DEEPSEEK_V3 = (
    *("model.family=deepseek_v3", *EXPERTS[2:4], "model.n_kv_heads=4", "model.balance_loss=0.5", "model.bias_rate=0.0"),
    *("model.n_groups=3", "model.n_active_groups=2", "model.n_shared_experts=2", "model.rope_scaling_factor=4.0"),
    *("model.q_lora_rank=12", "model.kv_lora_rank=8", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4"),
    *("model.v_head_dim=6", "model.n_dense_layers=1", "model.dense_ffn_dim=20"),
)
FURTHER = (*DEEPSEEK_V3, "model.n_further_tokens=1")
HYBRID = (
    *("model.head_dim=16", "model.full_interval=2", "model.partial_rotary_factor=0.375", "model.linear_key_heads=4"),
    *("model.linear_value_heads=8", "model.linear_key_dim=6", "model.linear_value_dim=10"),
)
QWEN3_5 = ("model.family=qwen3_5", *HYBRID)
QWEN3_5_MOE = ("model.family=qwen3_5_moe", *HYBRID, *EXPERTS[2:5], "model.n_shared_experts=2")
QWEN3_NEXT = ("model.family=qwen3_next", *QWEN3_5_MOE[1:])
GATHER = ("parallelism.context_parallel=gather",)
EP, EP3, EP4 = ("parallelism.ep=2",), ("parallelism.ep=3",), ("parallelism.ep=4",)
EPS = (*EP, *EP3, *EP4)
EIGHT = ("model.n_experts=8",)
IMPLIED = (
    AOT,
    "activation_checkpoint.mode=selective",
    QWEN3[1],
    *EXPERTS[1:],
    SMOLLM3[1],
    *OLMO3[1:],
    *GEMMA2[1:],
    *GEMMA3[1:],
    *DEEPSEEK_V3[1:],
    "model.base_layers=1",
    *QWEN3_5_MOE[1:],
    *EIGHT,
    *EPS,
)
SHORT = {
    QWEN3[0]: "qwen3",
    EXPERTS[0]: "qwen3_moe",
    OLMOE[0]: "olmoe",
    MISTRAL[0]: "mistral",
    QWEN2[0]: "qwen2",
    OLMO2[0]: "olmo2",
    OLMO3[0]: "olmo3",
    SMOLLM3[0]: "smollm3",
    GEMMA2[0]: "gemma2",
    GEMMA3[0]: "gemma3",
    GPT_OSS[0]: "gpt_oss",
    DEEPSEEK_V3[0]: "deepseek_v3",
    FURTHER[-1]: "further tokens",
    "model.base_dim=8": "base model",
    QWEN3_5[0]: "qwen3_5",
    QWEN3_5_MOE[0]: "qwen3_5_moe",
    QWEN3_NEXT[0]: "qwen3_next",
    "compile.enable=true": "compile",
    GATHER[0]: "gather",
    FULL[0]: "recompute full",
    BY_OP[1]: "recompute op",
    BY_LAYER[1]: "recompute layer",
}
TIED = ("model.tie_embeddings=true",)
BASE = ("model.base_dim=8", "model.base_layers=1")  # a quarter of the width
EVERY, LAST = ("parallelism.gradient_sync=every",), ("parallelism.gradient_sync=last",)
PAIRS = ("parallelism.pp_microbatch_size=2",)
CHUNKS = ("loss.chunk_tokens=7",)  # several, also where "auto" makes one
FOUR_KV_HEADS = ("model.n_kv_heads=4",)


ALL_OPTIMIZERS = (
    *("optimizer.name=Muon", 'optimizer.groups.0.parameters=["output.weight"]', "optimizer.groups.0.optimizer=Lion"),
    *("optimizer.groups.0.lr_factor=0.1", 'optimizer.groups.1.parameters=["*.router.weight"]'),
    *("optimizer.groups.1.optimizer=SGD", "optimizer.momentum=0.9", "optimizer.state_dtype=bfloat16"),
    *("optimizer.normuon_beta2=0.9", "optimizer.orthogonalization=polar_express"),
    "optimizer.cautious_weight_decay=true",
)
"""Muon for most matrices, and each other optimizer for some parameters."""


def schedule(name: str) -> tuple[str, ...]:
    return (f"parallelism.pp_schedule={name}",)


def depth(layers: int) -> tuple[str, ...]:
    return (f"model.n_layers={layers}",)


def split(*names: str) -> tuple[str, ...]:
    quoted = ", ".join(f'"{name}"' for name in names)
    return (f"parallelism.pp_split=[{quoted}]",)


QUICK = (
    Layout((1, 1, 1, 1), accumulation=3, rows=24),
    Layout((1, 2, 1, 1), (*EVERY,), accumulation=3, rows=24),
    Layout((1, 1, 2, 1), (*QWEN3, *TIED, *FULL)),
    Layout((1, 1, 1, 2), (*TIED, *FULL, *CHUNKS)),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *EVERY, *PAIRS, *CHUNKS, *TIED), accumulation=3, rows=24),
    Layout((1, 1, 1, 2), EXPERTS),
    Layout((1, 1, 1, 1), CHUNKS, cp=2),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP)),
)
"""One and two ranks."""

# Compiled: sharded blocks, and stages with a split backward pass; the others in SOAK. Compiling costs far more than all
# steps.
SLOW = (
    Layout((1, 1, 2, 1), (*COMPILE, *BY_OP, *LAST), accumulation=3, rows=24),
    Layout((1, 1, 1, 2), (*QWEN2, *BY_OP, *CHUNKS), accumulation=2),
    Layout((1, 1, 1, 2), OLMOE),
    Layout((1, 1, 2, 2), (*GPT_OSS, *EP)),
    Layout((1, 1, 1, 2), (*FURTHER, *FULL)),
    Layout((1, 1, 1, 2), (*QWEN3_5_MOE, *BY_OP)),
    Layout((2, 1, 1, 1), (*QWEN3, *schedule("Interleaved1F1B"), *TIED)),
    Layout((2, 1, 1, 1), (*schedule("GPipe"), *split("layers.1"))),
    Layout((2, 1, 1, 1), (*schedule("ZBVZeroBubble"), *depth(3), *COMPILE, *BY_OP)),
    Layout((2, 1, 1, 1), (*GEMMA3, *schedule("DualPipeV"), *FULL, *TIED)),
    Layout((1, 1, 1, 2), (*GEMMA2, *TIED), accumulation=2),
    Layout((2, 1, 1, 2), (*OLMO3, *schedule("InterleavedZeroBubble"), *FULL, *PAIRS, *TIED), rows=8),
    # context parallelism: each axis beside it, and ranks that share a head of keys
    Layout((1, 1, 1, 1), (*GATHER, *MISTRAL), accumulation=2, cp=2),
    Layout((1, 1, 2, 1), LAST, accumulation=2, cp=2),
    Layout((2, 1, 1, 1), (*schedule("ZBVZeroBubble"), *depth(3), *PAIRS, *TIED), cp=2),
    Layout((1, 1, 1, 2), SMOLLM3, cp=2),
    # experts, with the rows of the balance loss on several ranks; on several stages in UNEVEN
    Layout((1, 1, 1, 1), (*EXPERTS, *FULL), accumulation=3, rows=24),
    # experts dealt out over ranks
    Layout((1, 1, 1, 1), (*EXPERTS, *EP, *BY_OP), cp=2),
    Layout((1, 1, 4, 1), (*EXPERTS, *EP)),
    # hybrid sharding x tensor parallelism
    Layout((1, 2, 2, 2), accumulation=3, rows=24),
    # these two, sharded and replicated, have the same loss curve
    Layout((1, 1, 2, 4), FOUR_KV_HEADS),
    Layout((1, 2, 1, 4), FOUR_KV_HEADS),
)
"""One to eight ranks."""

THREE_AXES = (Layout((2, 1, 2, 2), (*schedule("1F1B"), *depth(5), *BY_LAYER, "parallelism.pp_microbatch_size=4")),)
"""Eight ranks: three axes at once, in the default suite."""


SOAK = (
    Layout((1, 2, 2, 1), accumulation=3, rows=24),
    Layout((1, 1, 2, 2), (*GEMMA2, *TIED, *LAST), accumulation=3, rows=24),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP, *FULL), accumulation=3, rows=24),
    Layout((1, 1, 1, 1), (*COMPILE, *BY_OP, *TIED)),
    Layout((1, 1, 1, 2), (*QWEN3_NEXT, FURTHER[-1], *GATHER), cp=2),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *LAST), accumulation=3, rows=24),
    Layout((1, 1, 1, 1), (*QWEN3, *FULL), accumulation=3, rows=24, cp=2),
    Layout((1, 1, 1, 1), (*EXPERTS, *GATHER, *FULL), cp=2),
    Layout((1, 2, 1, 1), (*OLMO2, *TIED), cp=2),
    Layout((1, 1, 1, 1), (*COMPILE, *FULL)),
    Layout((1, 1, 4, 1), (*EVERY, *TIED)),
    Layout((4, 1, 1, 1), (*schedule("Interleaved1F1B"), *depth(7), *BY_LAYER, *TIED)),
    # stages of several FSDP units with a split backward pass
    Layout((2, 1, 2, 1), (*schedule("DualPipeV"), *depth(7), *TIED)),
    Layout((1, 1, 1, 1), cp=4),
    # the last stage has only the norm and the head
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *depth(3), *split("norm"), *COMPILE)),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *FULL, *PAIRS)),
    Layout((1, 1, 1, 2), (*QWEN3, *COMPILE, *BY_OP)),
    Layout((1, 4, 1, 1), (*LAST, *FULL)),
    Layout((2, 1, 2, 1), (*QWEN2, *schedule("GPipe"), *EVERY, *TIED), accumulation=3, rows=24),
    Layout((2, 2, 1, 1), (*schedule("ZBVZeroBubble"), *PAIRS, *TIED)),
    Layout((1, 1, 2, 1), (*EXPERTS, *BY_OP), accumulation=3, rows=24),
    Layout((1, 1, 1, 1), (*GATHER, *COMPILE, *BY_OP), cp=2),
    Layout((1, 1, 2, 2), (*EXPERTS, *EP, *FULL)),
    Layout((1, 2, 1, 1), (*COMPILE, *BY_LAYER, *TIED)),
    Layout((1, 1, 1, 1), (*COMPILE, *BY_OP), cp=2),
    Layout((1, 1, 1, 4), (*FOUR_KV_HEADS, *BY_OP)),
    Layout((2, 1, 1, 2), (*QWEN3, *schedule("Interleaved1F1B"), *BY_OP, *PAIRS, *TIED), rows=8),
    Layout((1, 1, 1, 2), (*QWEN3, *TIED, *FULL)),
    Layout((1, 2, 1, 2), (*QWEN3, *BY_OP)),
    Layout((4, 1, 1, 1), (*schedule("LoopedBFS"), *depth(6), *PAIRS), accumulation=3, rows=24),
    Layout((2, 1, 1, 1), (*schedule("LoopedBFS"), *depth(5), *BY_LAYER)),
    Layout((2, 1, 2, 1), (*schedule("ZBVZeroBubble"), *depth(7), *EVERY), accumulation=3, rows=48),
    Layout((2, 1, 1, 2), (*schedule("DualPipeV"), *COMPILE, *PAIRS), rows=8),
    Layout((1, 1, 2, 2), (*QWEN3, *FULL), accumulation=3, rows=24),
    Layout((2, 2, 2, 1), (*schedule("Interleaved1F1B"), *EVERY), accumulation=3, rows=48),
    Layout((2, 2, 1, 2), (*schedule("ZBVZeroBubble"), *depth(4), *FULL, *PAIRS)),
    Layout((4, 1, 1, 2), (*schedule("GPipe"), *split("layers.0", "layers.1", "norm"), *PAIRS)),
    Layout((2, 1, 1, 2), (*schedule("1F1B"), *PAIRS), cp=2),
    Layout((1, 2, 2, 1), EVERY, accumulation=2, cp=2),
    Layout((1, 1, 2, 1), (*GATHER, *LAST), accumulation=3, rows=24, cp=2),
    Layout((1, 2, 1, 1), (*GATHER, *TIED), cp=2),
    Layout((2, 1, 1, 2), (*GATHER, *schedule("1F1B"), *QWEN3, *BY_OP, *PAIRS), cp=2),
    Layout((1, 1, 4, 1), (*EXPERTS, *EIGHT, *EP4, *FULL)),
    Layout((1, 1, 4, 2), (*EXPERTS, *EP)),
    Layout((1, 1, 2, 2), (*EXPERTS, *EIGHT, *EP4), cp=2),
    Layout((2, 1, 2, 1), (*EXPERTS, *EP, *schedule("1F1B"), *PAIRS), cp=2),
    Layout((2, 1, 2, 2), (*EXPERTS, *EP, *schedule("Interleaved1F1B"))),
    Layout((1, 1, 1, 1), (*GATHER, *FULL), cp=4),
    Layout((1, 1, 1, 2), GATHER, cp=2),
    Layout((2, 1, 1, 1), (*GATHER, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS), cp=2),
    Layout((1, 2, 1, 1), (*EXPERTS, *LAST), accumulation=3, rows=24, cp=2),
    Layout((1, 1, 1, 2), (*EXPERTS, *FULL), cp=2),
    Layout((1, 2, 2, 1), (*EXPERTS, *EP, *LAST), accumulation=3, rows=24),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP, *TIED), cp=2),
    Layout((1, 1, 2, 2), (*OLMOE, *EP, *FULL), accumulation=3, rows=24),
    Layout((2, 1, 1, 2), (*OLMOE, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS)),
    Layout((2, 1, 1, 1), (*EXPERTS, *schedule("ZBVZeroBubble"), *depth(3), *FULL)),
    Layout((2, 1, 2, 1), (*EXPERTS, *EP, *schedule("ZBVZeroBubble"), *depth(3), *FULL)),
    # each dense family on each axis
    *(
        Layout(mesh, (*family, *settings), cp=cp)
        for family in (MISTRAL, QWEN2, OLMO2, OLMO3, SMOLLM3, (*GEMMA2, *TIED), (*GEMMA3, *TIED))
        for mesh, cp, settings in (
            ((1, 1, 2, 1), 1, FULL),
            ((1, 1, 1, 2), 1, BY_OP),
            ((1, 2, 1, 1), 1, COMPILE),
            ((2, 1, 1, 1), 1, (*schedule("ZBVZeroBubble"), *depth(3))),
            ((1, 1, 1, 1), 2, ()),
            ((1, 1, 1, 1), 2, GATHER),
            ((2, 1, 1, 2), 1, (*schedule("1F1B"), *PAIRS)),
        )
    ),
    *(Layout((1, 1, 1, 2), (*family, *TIED, *CHUNKS), cp=2) for family in (GEMMA2, GEMMA3)),
    *(
        Layout(mesh, (*family, *settings), cp=cp)
        for family in (GPT_OSS, DEEPSEEK_V3, FURTHER)
        for mesh, cp, settings in (
            ((1, 1, 2, 1), 1, FULL),
            ((1, 1, 2, 1), 1, EP),
            ((1, 1, 1, 2), 1, BY_OP),
            ((1, 2, 1, 1), 1, TIED),
            ((2, 1, 1, 1), 1, (*schedule("ZBVZeroBubble"), *depth(3))),
            ((1, 1, 1, 1), 2, ()),
            ((1, 1, 1, 1), 2, GATHER),
            ((1, 1, 1, 2), 2, ()),
            ((2, 1, 1, 2), 1, (*schedule("1F1B"), *PAIRS)),
            ((1, 1, 2, 2), 1, (*EP, *FULL)),
        )
    ),
    # gated linear attention
    *(
        Layout(mesh, (*family, *settings), cp=cp)
        for family, mesh, cp, settings in (
            (QWEN3_5, (1, 1, 2, 1), 1, (FURTHER[-1], *FULL)),
            (QWEN3_5, (1, 1, 1, 2), 1, (*COMPILE, *BY_OP)),
            (QWEN3_5, (1, 2, 1, 1), 1, (*COMPILE, *TIED)),
            (QWEN3_5, (2, 1, 1, 1), 1, (FURTHER[-1], *schedule("ZBVZeroBubble"), *depth(3))),
            (QWEN3_5, (1, 1, 1, 1), 2, (*COMPILE, *FULL)),
            (QWEN3_5, (1, 1, 1, 1), 2, GATHER),
            (QWEN3_5, (1, 1, 1, 1), 4, ()),
            (QWEN3_5, (1, 1, 1, 2), 2, ()),
            (QWEN3_5, (2, 1, 1, 2), 1, (*schedule("1F1B"), *PAIRS)),
            (QWEN3_5_MOE, (1, 1, 2, 1), 1, EP),
            (QWEN3_5_MOE, (1, 1, 1, 1), 2, (*GATHER, *FULL)),
            (QWEN3_5_MOE, (1, 1, 2, 2), 1, (*EP, *FULL)),
            (QWEN3_5_MOE, (2, 1, 1, 1), 1, (*schedule("ZBVZeroBubble"), *depth(3))),
            (QWEN3_NEXT, (2, 1, 2, 1), 2, (FURTHER[-1], *EP, *schedule("1F1B"), *PAIRS)),
        )
    ),
    # norms whose squares are summed over tp
    Layout((1, 1, 1, 2), (*OLMOE, *BY_OP), cp=2),
)
"""Two to eight ranks: more layouts, too slow for the default suite."""

UNEVEN = (
    Layout((1, 1, 2, 1), (*QWEN3, *EVERY, *CHUNKS), accumulation=2, streams=9),
    # filler rows in the experts' counts, in their exchange, and in a pipeline
    Layout((1, 1, 3, 1), (*EXPERTS, *EP3), streams=8),
    Layout((2, 1, 2, 1), (*EXPERTS, *EP, *schedule("ZBVZeroBubble"), *depth(3)), streams=15),
)
"""Two to four ranks: data degrees that do not divide the sequences or the streams, so that steps have filler rows."""

SOAK_UNEVEN = (
    Layout((2, 1, 2, 1), (*schedule("1F1B"), *EVERY, *PAIRS, *TIED), accumulation=2, streams=9),
    Layout((1, 3, 1, 1), LAST, accumulation=3, streams=12),
    Layout((1, 1, 2, 2), (*EXPERTS, *EP), streams=9),
    Layout((1, 1, 2, 2), (*EXPERTS, *EP, *FULL), streams=9),
    Layout((1, 1, 2, 1), GATHER, accumulation=2, cp=2, streams=9),
    Layout((2, 1, 2, 1), (*EXPERTS, *schedule("ZBVZeroBubble"), *depth(3)), streams=15),
    Layout((1, 5, 1, 1), streams=8),
    Layout((1, 1, 5, 1), (*EXPERTS, *BY_OP), accumulation=2, streams=12),
    Layout((1, 1, 5, 1), TIED, rows=4, streams=5),  # some ranks have filler rows only
    Layout((1, 1, 7, 1), accumulation=3, streams=8),
    Layout((1, 7, 1, 1), (*OLMOE, *FULL), streams=12),
    Layout((1, 1, 3, 2), TIED, accumulation=2, streams=8),
    Layout((1, 3, 1, 2), QWEN3, streams=12),
    Layout((1, 1, 3, 1), (*EXPERTS, *EP3), accumulation=3, cp=2, streams=8),
    Layout((1, 1, 3, 1), FULL, accumulation=2, cp=2, streams=12),
    Layout((2, 1, 3, 1), (*EXPERTS, *EP3, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS), streams=8),
    *(
        Layout((2, 1, 3, 1), (*schedule(name), *sync, *depth(4)), accumulation=2, streams=streams)
        for name, sync, streams in (
            *(("GPipe", EVERY, 8), ("1F1B", LAST, 12), ("LoopedBFS", EVERY, 12), ("Interleaved1F1B", EVERY, 8)),
            *(("InterleavedZeroBubble", LAST, 12), ("ZBVZeroBubble", EVERY, 12), ("DualPipeV", LAST, 8)),
        )
    ),
    Layout((2, 3, 1, 1), (*schedule("Interleaved1F1B"), *PAIRS), accumulation=2, streams=12),
)
"""Three to seven ranks."""

SIXTEEN = (
    Layout((2, 2, 2, 2), (*schedule("Interleaved1F1B"), *BY_OP, *PAIRS), accumulation=3, rows=48),
    Layout((2, 1, 2, 2), (*schedule("Interleaved1F1B"), *BY_OP, *PAIRS), accumulation=3, rows=48, cp=2),
    Layout((2, 1, 2, 2), (*EXPERTS, *EIGHT, *EP4, *schedule("1F1B"), *PAIRS), cp=2),
)

ALL = (*QUICK, *SLOW, *THREE_AXES, *SOAK, *UNEVEN, *SOAK_UNEVEN, *SIXTEEN)


def is_supported(layout: Layout) -> bool:
    """Whether this torch supports the layout: before 2.13, none whose schedule splits the backward pass."""
    splits = {name for name, shape in SCHEDULES.items() if shape.splits_backward}
    return torch.__version__ >= "2.13" or layout.schedule not in splits


@dataclass(frozen=True)
class Measured:
    """Relative errors; for gradients, the largest over this rank's parameters.

    losses: loss of each step over all ranks. learned: relative difference between the last reference loss and that of
    the initial weights on the same rows. If it were 0, the trajectory would not test the updates.
    """

    gradient: float
    parameter: str
    loss: float
    grad_norm: float
    trajectory: float
    losses: tuple[float, ...]
    learned: float
    same_initial_weights: bool

    @property
    def worst(self) -> float:
        return max(self.gradient, self.loss, self.grad_norm, self.trajectory)


_losses: dict[tuple[str, str, str, int], list[Tensor]] = {}


def reference_losses(config: JobConfig, rows: int) -> list[Tensor]:
    """Losses of STEPS steps of plain gradient descent on all rows in one process; cached per process."""
    key = (repr(config.model), repr(config.float8), config.training.dtype, rows)
    if key not in _losses:
        _losses[key] = _reference_losses(config, rows)
    return _losses[key]


def _reference_losses(config: JobConfig, rows: int) -> list[Tensor]:
    model = plain_model(config)
    losses = []
    for step in range(STEPS):
        batch = global_batch("silent_ranks", step, rows)
        num_valid = (batch.labels != -100).sum()
        logits, term = further_term(model, batch, config.loss.further_tokens_weight)
        loss = cross_entropy_by_row(logits, batch.labels).sum() / num_valid
        objective, parameters = loss + term, list(model.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(objective, parameters), strict=True):
                parameter.sub_(LEARNING_RATE * gradient)
        losses.append(loss.detach())
    return losses


def measure(layout: Layout, *settings: str) -> Measured:
    """Build the trainer as training does, take two steps of gradient descent, and compare with one process.

    Odd rows are masked completely, so some microbatches or data ranks have no valid token.
    """
    torch._dynamo.reset()
    config = layout.config(f"optimizer.lr={LEARNING_RATE}", "optimizer.weight_decay=0.0", *settings)
    batches = [global_batch("silent_ranks", step, layout.rows) for step in range(STEPS)]
    reference = reference_step(config, batches[0])
    expected = reference_losses(config, layout.rows)
    trainer, mesh = build_on_mesh(config)
    same_weights = has_weights(trainer, reference.weights)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches):
        stats = trainer.train_step(local_batches(config, mesh, batch))
        losses.append(stats.mean_loss.clone())
        if step == 0:
            first = compare(trainer, stats.mean_loss, stats.grad_norm, reference, same_weights)
    for loss in losses:
        dist.all_reduce(loss)
    return Measured(
        first.gradient,
        first.parameter,
        first.loss,
        first.grad_norm,
        max(difference(loss, right) for loss, right in zip(losses, expected, strict=True)),
        tuple(loss.item() for loss in losses),
        difference(expected[-1], reference_step(config, batches[-1]).loss),
        same_weights,
    )


def measure_all(layouts: Sequence[Layout], dtype: str) -> list[Measured]:
    """Measure all layouts on this rank."""
    return [measure(layout, f"training.dtype={dtype}") for layout in layouts]
