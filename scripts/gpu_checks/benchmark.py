"""Check 7: training steps in the shape of an 8B model, against a hand-written loop on the same device."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from gpu_checks.plain import PlainDecoder, compile_plain, plain_step, rotary_tables
from gpu_checks.rows import Emit, Found, Row, SkippedError, Value, WrongError, require_errors, run_case
from gpu_checks.steps import RECOMPUTE
from gpu_checks.workload import (
    BOUNDS,
    Reference,
    Setup,
    build,
    compiled,
    configure,
    dtypes,
    on_this_device,
    one_rank,
    random_batch,
    small_model,
    step_errors,
)
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.models.family import resolve_model
from titanlite.runtime.memory import GIB, is_out_of_memory
from titanlite.runtime.peak_flops import device_peak_flops
from titanlite.runtime.torch_internals import reset_compiler
from titanlite.tools.parity.measure import full_tensor, named_parameters

CHECK = "7 benchmark"
FULL_LAYERS = 32
"""Layers of the 8B, to which the fit extrapolates."""
GOAL = 0.97
"""Least speed of a compiled step relative to the hand-written loop."""
ROUNDS = 5
DOCUMENTS = (1531, 212, 97, 4096, 640, 1024, 33, 2048)
"""Lengths of documents, 1,210 tokens in the mean."""


@dataclass(frozen=True)
class Case:
    """settings: beyond the shape. rows: sequences per step. tiny: whether it also runs at the small size."""

    name: str
    settings: Sequence[str] = field(default_factory=list)
    compiles: bool = True
    documents: bool = False
    rows: int = 1
    tiny: bool = False


COMPILED = Case("compiled")
CASES = (
    Case("compiled, recompute by op", RECOMPUTE["by op"]),
    Case("eager", compiles=False, tiny=True),
    Case("compiled, documents", documents=True, tiny=True),
    Case("compiled, 2 sequences", rows=2),
    Case("compiled, recompute full", RECOMPUTE["full"]),
)
"""The most important first: the last ones are skipped if no time is left."""


class Loop(Protocol):
    """A training loop. step(mark): a step; calls mark before and after forward, backward and update."""

    def step(self, mark: Callable[[], None]) -> None: ...


@dataclass(frozen=True)
class Measured:
    """A loop at one number of layers: seconds, bytes over those before it was built."""

    layers: int
    step_s: float
    parts_s: tuple[float, float, float]
    compile_s: float
    peak_bytes: int
    flops: float
    tokens: int


class Marks:
    """Points in time on the device's own clock, without waiting for it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def add(self) -> None:
        if self._setup.device_type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between one mark and the next. Waits for the device."""
        self._setup.synchronize()
        on_device = [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return on_device or [after - before for before, after in pairwise(self._times)]


def layers_of(setup: Setup) -> tuple[int, int]:
    return (1, 2) if setup.tiny else (6, 12)


def shape(setup: Setup, case: Case, layers: int) -> JobConfig:
    """The configuration of a case: an 8B with fewer layers in bfloat16."""
    model = small_model(setup, "llama3")
    if not setup.tiny:
        model = ["model.family=llama3", "model.flavor=8B", "training.seq_len=8192"]
    batch = [f"training.{key}_batch_size={case.rows}" for key in ("local", "global")]
    extra = [*case.settings, *(compiled(setup) if case.compiles else [])]
    if setup.tiny and case.compiles:
        extra.append("compile.backend=eager")  # traces the model, and generates no code
    rope = "model.rope_scaling_factor=1.0"  # the hand-written loop has no scaling
    return configure(setup, *model, rope, f"model.n_layers={layers}", *batch, *dtypes("bfloat16"), *extra)


class OwnLoop:
    """titanlite's trainer, with random weights and the same batch in each step."""

    def __init__(self, setup: Setup, case: Case, layers: int) -> None:
        config = shape(setup, case, layers)
        self.trainer = build(setup, config, draws_weights=False)
        lengths = [length // (100 if setup.tiny else 1) + 1 for length in DOCUMENTS] if case.documents else ()
        self._batches = on_this_device(self.trainer, [all_valid(random_batch(config, case.rows, documents=lengths))])
        self._mark: Callable[[], None] = no_mark
        self.trainer.model_parts[0].register_forward_hook(lambda *_: self._mark())
        forward_backward = self.trainer.forward_backward

        def marked(batch: Batch, num_valid: Tensor) -> Tensor:
            shares = forward_backward(batch, num_valid)
            self._mark()
            return shares

        self.trainer.forward_backward = marked  # type: ignore[method-assign]

    def step(self, mark: Callable[[], None]) -> None:
        self._mark = mark
        mark()
        self.trainer.train_step(self._batches)
        mark()


class PlainLoop:
    """The hand-written loop, in the shape of titanlite's model."""

    def __init__(self, setup: Setup, case: Case, layers: int) -> None:
        config = shape(setup, case, layers)
        self._model = plain_model(config, torch.bfloat16).to_empty(device=setup.device)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        compile_plain(self._model, config.compile.backend)
        self._optimizer = adamw(self._model)
        batch = all_valid(random_batch(config, case.rows))
        self._tokens, self._labels = batch.tokens.to(setup.device), batch.labels.to(setup.device)
        self._tables = plain_tables(config, torch.float32, setup.device)

    def step(self, mark: Callable[[], None]) -> None:
        plain_step(self._model, self._optimizer, self._tokens, self._labels, self._tables, mark)


def plain_model(config: JobConfig, compute: torch.dtype) -> PlainDecoder:
    """The hand-written model, on the meta device."""
    model = resolve_model(config.model)[1]
    with torch.device("meta"):
        return PlainDecoder(
            *(model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim, model.vocab_size),
            norm_eps=model.norm_eps,
            compute=compute,
        )


def plain_tables(config: JobConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    model = resolve_model(config.model)[1]
    cos, sin = rotary_tables(config.training.seq_len, model.head_dim, model.rope_theta, dtype)
    return cos.to(device), sin.to(device)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def all_valid(batch: Batch) -> Batch:
    """The batch with a label at each position."""
    return batch._replace(labels=batch.tokens.roll(-1, 1))


def no_mark() -> None: ...


def check_side_by_side(emit: Emit, setup: Setup) -> None:
    """The compiled step and the hand-written loop: the same numbers; both at both sizes; in turns at the first one."""
    with one_rank(setup):
        emit(run_case(CHECK, "the hand-written loop", lambda: same_numbers(setup)))
        kinds: dict[str, type[OwnLoop] | type[PlainLoop]] = {"hand-written loop": PlainLoop, "compiled": OwnLoop}
        measured: dict[str, list[Measured]] = {name: [] for name in kinds}
        loops: dict[str, Loop] = {}
        for layers in layers_of(setup):
            for name, kind in kinds.items():
                row, loop = measure_case(setup, name, COMPILED, layers, kind, measured[name])
                emit(row)
                if loop is not None and layers == layers_of(setup)[0]:
                    loops[name] = loop
                del loop
                if not loops:  # at the larger size, both do not fit
                    free(setup)
            if layers == layers_of(setup)[0]:
                emit(run_case(CHECK, "compiled against the hand-written loop", lambda: alternate(setup, loops)))
            loops.clear()
            free(setup)
        for name, each in measured.items():
            emit(run_case(CHECK, f"{name}, {FULL_LAYERS} layers by the fit", lambda each=each: fit(setup, each)))  # type: ignore[misc]


def check_case(emit: Emit, setup: Setup, index: int) -> None:
    """One of CASES at both sizes."""
    case = CASES[index]
    if setup.tiny and not case.tiny:
        emit(Row(CHECK, case.name, "skipped", "at the small size it is the code of the other cases"))
        return
    measured: list[Measured] = []
    with one_rank(setup):
        for layers in layers_of(setup):
            row, loop = measure_case(setup, case.name, case, layers, OwnLoop, measured)
            emit(row)
            del loop
            free(setup)
        emit(run_case(CHECK, f"{case.name}, {FULL_LAYERS} layers by the fit", lambda: fit(setup, measured)))


def free(setup: Setup) -> None:
    """Give back the memory of loops that are no longer used. Compiled code and cycles would keep it."""
    reset_compiler()
    gc.collect()
    if setup.device_type == "cuda":
        torch.cuda.empty_cache()


def measure_case(
    setup: Setup, name: str, case: Case, layers: int, kind: type[OwnLoop] | type[PlainLoop], measured: list[Measured]
) -> tuple[Row, Loop | None]:
    """Build a loop and measure it; adds to `measured`. Returns the row, and the loop unless it failed."""
    loops: list[Loop] = []

    def make() -> Loop:
        loops.append(kind(setup, case, layers))
        return loops[0]

    def run() -> Found:
        try:
            found = measure(setup, make, case, layers)
        except Exception as error:
            if is_out_of_memory(error):
                raise SkippedError(f"needs more memory than the device has: {error}") from None
            raise
        measured.append(found)
        return describe(setup, found)

    row = run_case(CHECK, f"{name}, {layers} layers", run)
    return row, loops[0] if loops and row.status == "measured" else None


def measure(setup: Setup, make: Callable[[], Loop], case: Case, layers: int) -> Measured:
    """Build the loop; time of a step, of its parts, and of the compilation; peak memory."""
    on_gpu = setup.device_type == "cuda"
    steps = 2 if setup.tiny else 8
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    loop = make()
    setup.synchronize()
    start = time.perf_counter()
    loop.step(no_mark)
    setup.synchronize()
    first_s = time.perf_counter() - start
    loop.step(no_mark)
    setup.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loop.step(no_mark)
    setup.synchronize()
    step_s = (time.perf_counter() - start) / steps
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    parts = []
    for _ in range(3):
        marks = Marks(setup)
        loop.step(marks.add)
        parts.append(marks.seconds())
    forward, backward, update = (statistics.median(column) for column in zip(*parts, strict=True))
    config = shape(setup, case, layers)
    family, hyper_parameters = resolve_model(config.model)
    tokens = case.rows * config.training.seq_len
    flops = tokens * family.flops_per_token(hyper_parameters, config.training.seq_len)
    return Measured(layers, step_s, (forward, backward, update), max(0.0, first_s - step_s), peak, flops, tokens)


def describe(setup: Setup, found: Measured) -> Found:
    """The row of a measurement: the columns of the benchmark's table."""
    forward, backward, update = found.parts_s
    values: dict[str, Value] = {
        **rates(setup, found.tokens, found.flops, found.step_s),
        "GiB": found.peak_bytes / GIB if found.peak_bytes else None,
        "compile s": found.compile_s,
        "forward ms": 1000 * forward,
        "backward ms": 1000 * backward,
        "update ms": 1000 * update,
    }
    return Found(f"{found.tokens / found.step_s:,.0f} tokens/s", values, measured=True)


def rates(setup: Setup, tokens: int, flops: float, seconds: float) -> dict[str, Value]:
    peak = device_peak_flops(setup.device, torch.bfloat16)
    mfu = "unknown peak" if peak is None else flops / seconds / peak
    return {"tokens/s": tokens / seconds, "TFLOP/s": flops / seconds / 1e12, "MFU": mfu}


def fit(setup: Setup, measured: Sequence[Measured]) -> Found:
    """The line through both sizes, extended to all layers. Memory too, which may exceed that of the device."""
    if len(measured) != 2:
        raise SkippedError("needs both sizes")
    first, second = measured
    if second.step_s <= first.step_s:
        raise SkippedError("the larger size took no longer: too small or too noisy for a fit")

    def extended(left: float, right: float) -> float:
        return left + (right - left) / (second.layers - first.layers) * (FULL_LAYERS - first.layers)

    seconds = extended(first.step_s, second.step_s)
    flops = extended(first.flops, second.flops)
    peak_bytes = extended(first.peak_bytes, second.peak_bytes)
    values = rates(setup, first.tokens, flops, seconds) | {"GiB": peak_bytes / GIB if peak_bytes else None}
    return Found(f"{first.tokens / seconds:,.0f} tokens/s", values, measured=True)


def alternate(setup: Setup, loops: dict[str, Loop]) -> Found:
    """The ratio of the speeds, measured in turns."""
    if len(loops) != 2:
        raise SkippedError("needs both loops in memory at the same time")
    ratios = []
    for loop in loops.values():
        loop.step(no_mark)
    setup.synchronize()
    for _ in range(ROUNDS):
        seconds = {}
        for name, loop in loops.items():
            start = time.perf_counter()
            for _ in range(2):
                loop.step(no_mark)
            setup.synchronize()
            seconds[name] = time.perf_counter() - start
        ratios.append(seconds["hand-written loop"] / seconds["compiled"])
    ratio = statistics.median(ratios)
    reached = "reached" if ratio >= GOAL else "not reached"
    text = f"{ratio:.3f} of its speed ({min(ratios):.3f} to {max(ratios):.3f}); the goal of {GOAL} is {reached}"
    if ratio < GOAL and not setup.tiny:  # small shapes measure the host
        raise WrongError(text)
    return Found(text, {"ratio": ratio, "least": min(ratios), "most": max(ratios)}, measured=setup.tiny)


def same_numbers(setup: Setup) -> Found:
    """The hand-written model computes what titanlite's computes, so that their speeds compare: in float64."""
    settings = [*small_model(setup, "llama3"), "training.local_batch_size=2", "training.global_batch_size=2"]
    config = configure(setup, *settings, *dtypes("float64"), "training.max_norm=0.0")
    trainer = build(setup, config)
    weights = {name: full_tensor(parameter.detach()) for name, parameter in named_parameters(trainer)}
    plain = plain_model(config, torch.float64).to_empty(device=setup.device).double()
    plain.load_state_dict(weights)
    batch = all_valid(random_batch(config, 2))
    stats = trainer.train_step(on_this_device(trainer, [batch]))
    tables = plain_tables(config, torch.float64, setup.device)
    loss = plain(batch.tokens.to(setup.device), batch.labels.to(setup.device), *tables)
    loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = step_errors(trainer, stats.mean_loss, Reference(loss.item(), gradients))
    return require_errors(found, dict.fromkeys(found, BOUNDS["float64"]))
