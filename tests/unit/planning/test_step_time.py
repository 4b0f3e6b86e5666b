"""The time model against closed formulas, on a profile of round numbers: its parts, what overlaps, pipelines."""

import csv
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import published
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.planning import step_time
from titanlite.planning.estimate import estimate
from titanlite.planning.hardware.machine import Grid, Link, Profile, load_profile
from titanlite.planning.step_time import GAPS, HIDDEN, PARTS, PER_DOUBLING, UNCERTAINTY, StepTime, predict
from titanlite.planning.work import PassWork, Work
from titanlite.runtime.errors import UsageError

NAMES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send")
RATE = 1e12


def profile(device: str = "cuda", *, latency_s: float = 1e-9, bytes_per_s: float = 1e10, **changes: object) -> Profile:
    """All work at the same rates, and no overhead."""
    products = Grid({"m": (64,), "k": (64,), "n": (64,)}, (RATE,))
    scores = Grid({"seq_len": (64,), "head_dim": (64,)}, (RATE,))
    dtypes = ("float64", "float32", "bfloat16")
    links = dict.fromkeys(NAMES, Link(latency_s, bytes_per_s))
    found = Profile(
        name="round",
        device=device,  # type: ignore[arg-type]
        ranks_per_node=8,
        computing=8,
        memory_gib=80,
        peak_flops=dict.fromkeys(dtypes, RATE),
        matmul=dict.fromkeys(dtypes, products),
        attention={dtype: {"forward": scores, "backward": scores} for dtype in dtypes},
        memory=Grid({"bytes": (1,)}, (1e15,)),
        operation_s=1e-12,
        unit_s=1e-12,
        network={"node": links, "cluster": links},
    )
    return replace(found, **changes)  # type: ignore[arg-type]


BASE = (
    *("model.flavor=debug", "model.n_layers=8", "model.vocab_size=512", "training.seq_len=256"),
    *("training.global_batch_size=16", "training.local_batch_size=2", "training.mixed_precision_param=bfloat16"),
)


def config_of(world_size: int, settings: Sequence[str], device: str = "cuda") -> JobConfig:
    values = dict(each.split("=") for each in (*BASE, *settings))  # the last one of a key counts
    arguments = [f"--{key}={value}" for key, value in values.items()]
    return load_config(arguments, world_size=world_size, device_type=device, checks_files=False)


def predicted(world_size: int, *settings: str, on: Profile | None = None) -> StepTime:
    machine = on or profile()
    config = config_of(world_size, settings, machine.device)
    return predict(config, estimate(config, world_size, device_type=machine.device), machine)


def test_one_rank_takes_its_flops() -> None:
    found = predicted(1)
    plan = estimate(config_of(1, ()), 1, device_type="cuda").ranks[0]
    assert tuple(found.parts) == PARTS
    # rates are equal, and the rest of the work takes almost no time: the loss is matrix products, too
    compute = found.parts["products"] + found.parts["attention"] + found.parts["loss"]
    assert compute == pytest.approx(plan.flops / RATE, rel=1e-3)
    assert found.total == pytest.approx(found.least) == pytest.approx((1 + GAPS) * plan.flops / RATE, rel=2e-2)


def test_recomputation_takes_the_planned_flops() -> None:
    found = predicted(1, "activation_checkpoint.mode=full")
    plan = estimate(config_of(1, ("activation_checkpoint.mode=full",)), 1, device_type="cuda").ranks[0]
    assert found.parts["recomputation"] == pytest.approx(plan.recomputed_flops / RATE, rel=1e-2)
    by_op = predicted(1, "activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=op")
    half = predicted(*(1, "activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=layer"))
    assert by_op.parts["recomputation"] < 0.05 * found.parts["recomputation"]
    assert half.parts["recomputation"] == pytest.approx(found.parts["recomputation"] / 2)


def test_float8_products_have_the_rate_of_their_unit() -> None:
    plain, matmul = predicted(1).parts["products"], profile().matmul
    rate = {name: replace(matmul["float32"], values=(factor * RATE,)) for name, factor in (("slow", 0.1), ("fast", 2))}
    machine = profile(matmul={**matmul, "float32": rate["slow"]})
    fast = profile(matmul={**matmul, "float8_e4m3fn": rate["fast"]})
    rowwise, mxfp8 = "float8.recipe=rowwise", "float8.recipe=mxfp8"
    assert predicted(1, rowwise, on=machine).parts["products"] == pytest.approx(plain)  # at the rate of bfloat16
    assert predicted(1, rowwise, on=fast).parts["products"] == pytest.approx(plain * (2 / 2 + 1) / 3)
    assert predicted(1, mxfp8, on=machine).parts["products"] == pytest.approx(10 * plain)
    assert predicted(1, rowwise, "float8.product=emulated", on=machine).parts["products"] == pytest.approx(
        plain * (2 * 10 + 1) / 3
    )


def test_qk_clip_computes_scores_once_more() -> None:
    settings = ("activation_checkpoint.mode=full", "training.local_batch_size=16", "training.seq_len=4096")
    without, found = (predicted(1, *settings, f"optimizer.qk_clip={clip}") for clip in (0, 100))
    model = config_of(1, settings).hyper_parameters
    per_head = 2 * 4096 * (4096 + 2**24 // (16 * model.n_heads * 4096)) // 2 * model.head_dim
    more = found.parts["products"] - without.parts["products"]
    assert more == pytest.approx(16 * model.n_layers * model.n_heads * per_head / RATE, rel=1e-2)
    assert found.parts["recomputation"] == without.parts["recomputation"]


def test_a_gpu_hides_the_gathers_that_a_cpu_waits_for() -> None:
    fast, slow = profile(), profile(bytes_per_s=1e7)
    hidden = predicted(4, on=fast).parts["data parallel"]
    assert hidden < 0.15 * predicted(4, on=profile("cpu")).parts["data parallel"]
    # a link that is too slow to be hidden is waited for, less what the computation hides
    waited = predicted(4, on=slow)
    everything = predicted(4, on=profile("cpu", bytes_per_s=1e7)).parts["data parallel"]
    computation = waited.total - waited.parts["data parallel"]
    assert everything - computation <= waited.parts["data parallel"] <= everything


def test_hidden_communication_and_more_nodes_cost_time() -> None:
    hidden, free = predicted(4), predicted(4, on=profile(bytes_per_s=1e18))
    everything = predicted(4, on=profile("cpu")).parts["data parallel"]
    assert hidden.parts["overlap"] == pytest.approx(HIDDEN * (everything - hidden.parts["data parallel"]), rel=1e-3)
    assert free.parts["overlap"] < 1e-3 * hidden.parts["overlap"]
    shares = [found.parts["gaps"] / (found.total - found.parts["gaps"]) for found in (predicted(8), predicted(16))]
    assert shares == pytest.approx([GAPS, GAPS + PER_DOUBLING])


def test_tensor_parallel_waits_for_its_collectives() -> None:
    found = predicted(2, "parallelism.tp=2")
    config = config_of(2, ("parallelism.tp=2",))
    plan = estimate(config, 2, device_type="cuda").ranks[0]
    sent = {part.operation: part.sent_bytes for part in plan.traffic if part.axis == "tp"}
    assert found.parts["tp"] == pytest.approx(sum(sent.values()) / 1e10, rel=1e-2)
    assert found.parts["data parallel"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_a_pipeline_idles_as_the_formula_says(schedule: str, stages_per_rank: int) -> None:
    """Narayanan et al. (2021): (p - 1) / v / m of the time of the work, with equal stages."""
    settings = ("parallelism.pp=4", f"parallelism.pp_schedule={schedule}", "parallelism.gradient_sync=last")
    small_ends = ("model.vocab_size=16", "model.n_layers=16")
    found = predicted(4, *settings, *small_ends, on=profile(bytes_per_s=1e18))
    work = found.total - found.parts["pipeline"]
    assert found.parts["pipeline"] / work == pytest.approx(3 / stages_per_rank / 16, rel=0.25)
    assert found.least <= work


def test_messages_between_stages_take_time() -> None:
    settings = ("parallelism.pp=2", "parallelism.pp_schedule=1F1B", "parallelism.gradient_sync=last")
    free = predicted(2, *settings, on=profile(bytes_per_s=1e18)).parts["pipeline"]
    assert predicted(2, *settings, on=profile(bytes_per_s=1e8)).parts["pipeline"] > 1.05 * free


def test_ranks_share_the_cores_of_a_node_and_one_rank_has_several() -> None:
    """8 cores: 1 rank computes with 8 threads, 8 ranks with one each, and on 4 cores they take turns."""
    alone, one_core = predicted(1, on=profile("cpu")), predicted(1, on=profile("cpu", computing=1))
    assert alone.parts["products"] == pytest.approx(one_core.parts["products"] / 8)
    shared, apart = predicted(8, on=profile("cpu", computing=4)), predicted(8, on=profile("cpu"))
    assert shared.total == pytest.approx(2 * apart.total)


def test_context_and_expert_parallelism_have_their_parts() -> None:
    assert predicted(2, "parallelism.cp=2").parts["cp"] > 0
    experts = ("model.family=qwen3_moe", "parallelism.ep=2")
    assert predicted(2, *experts).parts["ep"] > 0
    assert math.isclose(sum(predicted(2, *experts).parts.values()), predicted(2, *experts).total)


def test_an_update_with_muon_takes_the_products_and_the_exchange_of_owners() -> None:
    """One matrix per rank and round, of which the first one is the most expensive."""
    adamw, muon = (predicted(4, f"optimizer.name={name}", "parallelism.tp=2") for name in ("AdamW", "Muon"))
    rank = estimate(config_of(4, ("optimizer.name=Muon", "parallelism.tp=2")), 4, device_type="cuda").ranks[0]
    (exchange,) = rank.owners.traffic
    assert exchange.calls == 2 * math.ceil(8 * 7 / 4)
    expected = sum(product.flops for product in rank.owners.products) / RATE + exchange.sent_bytes / 1e10
    assert muon.parts["update"] - adamw.parts["update"] == pytest.approx(expected, rel=1e-2)
    others = [part for part in PARTS if part not in ("update", "gaps")]
    assert [muon.parts[part] for part in others] == [adamw.parts[part] for part in others]


def test_a_dtype_without_rates_is_named() -> None:
    on = profile(matmul={"bfloat16": profile().matmul["bfloat16"]})
    with pytest.raises(UsageError, match=r"'round' has no rates of matrix products in float32, only in bfloat16"):
        predicted(1, "training.mixed_precision_param=float32", on=on)


def test_the_orthogonalization_has_the_rate_of_its_dtype() -> None:
    slow = profile().matmul | {"float32": Grid({"m": (64,), "k": (64,), "n": (64,)}, (RATE / 1000,))}
    on = profile(bytes_per_s=1e18, matmul=slow)
    wide, narrow = (
        predicted(4, "optimizer.name=Muon", f"optimizer.newton_schulz_dtype={dtype}", on=on).parts["update"]
        for dtype in ("float32", "auto")
    )
    assert wide > 100 * narrow


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ("model.flavor=8B model.n_layers=16", 1.0),
        ("model.flavor=1B model.n_layers=16 model.tie_embeddings=false", 1.03),
        ("model.flavor=8B model.n_layers=32 activation_checkpoint.mode=full", 1.0),
    ],
)
def test_automatic_stages_are_as_fast_as_the_best(settings: str, most: float) -> None:
    """Of all splits in two, by a profile that the split does not know. Stages of equal size take 5 to 22 % longer."""
    given = (*settings.split(), "model.vocab_size=128256", "training.seq_len=8192", "parallelism.pp=2")

    def seconds(*split: str) -> float:
        return predicted(2, *given, *split, on=load_profile("h100")).total

    layers = config_of(2, given).hyper_parameters.n_layers
    half = seconds(f'parallelism.pp_split=["layers.{layers // 2}"]')
    best = min(seconds(f'parallelism.pp_split=["layers.{first}"]') for first in range(layers // 2, layers))
    assert seconds() <= most * best < 0.97 * half


def published_ratios(model: str) -> list[float]:
    """Predicted / published tokens per second of the rows of 8 GPUs. All rows: python -m benchmarks published."""
    with published.ROWS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["gpus"]) == (model, "8")]
    return [
        published.predicted(row, published.profile_of(row["hardware"])) / float(row["tokens_per_s"])
        for row in rows
        if row["comparable"] == "yes"
    ]


@pytest.mark.parametrize("model", ["8B", "MPT-7b", "MPT-125m"])
def test_published_runs_are_as_fast_as_predicted(model: str) -> None:
    ratios = published_ratios(model)
    assert ratios
    assert all(abs(ratio - 1) < UNCERTAINTY for ratio in ratios)


def test_a_plan_that_forgets_the_logits_is_beyond_the_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "head_work", lambda *_: PassWork(Work(), Work(), Work()))
    assert all(ratio > 1 + UNCERTAINTY for ratio in published_ratios("MPT-125m"))
