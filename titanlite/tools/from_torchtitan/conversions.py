"""Values of titanlite's keys that follow from several keys of torchtitan, or have other units."""

import math
from typing import Any

from titanlite.models.registry import FAMILIES
from titanlite.optim.registry import OPTIMIZERS
from titanlite.tools.from_torchtitan.rules import Settings, Translation

_QWEN3_DEBUG = {
    "vocab_size": 2048,
    "dim": 256,
    "n_layers": 8,
    "n_heads": 16,
    "n_kv_heads": 8,
    "head_dim": 128,
}
_UNBALANCED = {"balance_loss": 0.0}  # torchtitan's qwen3 has no balance loss, and its biases of experts stay 0
_LLAMA3_DEBUG = {"flavor": "debug", "vocab_size": 2048, "rope_scaling_factor": 8.0}

FLAVORS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "debugmodel"): ("llama3", _LLAMA3_DEBUG),
    **{("llama3", size): ("llama3", {"flavor": size}) for size in ("8B", "70B", "405B")},
    **{("llama3", f"debugmodel_{attention}"): ("llama3", _LLAMA3_DEBUG) for attention in ("flex_attn", "varlen_attn")},
    **{("llama3", f"8B_{attention}"): ("llama3", {"flavor": "8B"}) for attention in ("flex", "varlen")},
    ("qwen3", "debugmodel"): (
        "qwen3",
        {"flavor": "debug", **_QWEN3_DEBUG, "ffn_dim": 3072, "tie_embeddings": True},
    ),
    **{("qwen3", size): ("qwen3", {"flavor": size}) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    ("qwen3", "debugmodel_moe"): (
        "qwen3_moe",
        {"flavor": "debug", **_QWEN3_DEBUG, "ffn_dim": 768, "n_experts": 64, "n_active_experts": 8, **_UNBALANCED},
    ),
    ("qwen3", "30B-A3B"): ("qwen3_moe", {"flavor": "30B-A3B", **_UNBALANCED}),
    ("qwen3", "235B-A22B"): ("qwen3_moe", {"flavor": "235B-A22B", "rope_theta": 5e6, **_UNBALANCED}),
}
"""torchtitan's name and flavor -> family, and keys of [model]."""

DOCUMENT_MASKED = ("flex", "varlen", "flex_attn", "varlen_attn")
"""Last parts of the names of flavors whose attention stays inside documents."""

DATASETS = {
    "c4": {"kind": "hf", "path": "allenai/c4", "subset": "en", "split": "train"},
    "c4_validation": {"kind": "hf", "path": "allenai/c4", "subset": "en", "split": "validation"},
    "c4_test": {"kind": "hf", "path": "tests/assets/c4_test", "split": "train"},
}
"""torchtitan's name of a dataset -> a table of sources."""

SCHEDULES = (
    *("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"),
    *("ZBVZeroBubble", "DualPipeV"),
)


def model(settings: Settings) -> Translation:
    """[model], and the document mask, which torchtitan decides by the flavor."""
    name, flavor = settings["model.name"], settings["model.flavor"]
    if (name, flavor) not in FLAVORS:
        known = ", ".join(ours for theirs, ours in FLAVORS if theirs == name)
        reason = f"of {name}, titanlite knows {known}" if known else "titanlite has llama3, qwen3, qwen3_moe and olmoe"
        return Translation(
            {"model.family": ""},
            lost=f"{reason}; a new family: docs/models.md",
            fill_in=f"model.family and model.flavor: no counterpart of {name} {flavor}",
        )
    family, keys = FLAVORS[name, flavor]
    values = {"model.family": family, **{f"model.{key}": value for key, value in keys.items()}}
    if settings["training.seq_len"] > FAMILIES[family].flavors[keys["flavor"]].max_seq_len:
        values["model.max_seq_len"] = settings["training.seq_len"]  # torchtitan warns
    if flavor.partition("_")[2] in DOCUMENT_MASKED:
        values["data.document_mask"] = True
    return Translation(values)


def tokenizer(settings: Settings) -> Translation:
    """tokenizer.path; the older key has precedence, as in torchtitan."""
    path = settings["model.tokenizer_path"] or settings["model.hf_assets_path"]
    fill_in = ""
    if path.endswith("tokenizer.model"):
        fill_in = "tokenizer.path: a folder with a tokenizer.json in place of torchtitan's tokenizer.model"
    elif not settings.given & {"model.tokenizer_path", "model.hf_assets_path"}:
        fill_in = "tokenizer.path: torchtitan's default is in the folder of its checkout"
    return Translation({"tokenizer.path": path}, fill_in=fill_in)


def sources(settings: Settings) -> Translation:
    """[[data.sources]]."""
    return _source("data.sources", settings["training.dataset"], settings["training.dataset_path"])


def validation_sources(settings: Settings) -> Translation:
    """[[validation.sources]]."""
    return _source("validation.sources", settings["validation.dataset"], settings["validation.dataset_path"])


def _source(target: str, name: str, path: str | None) -> Translation:
    if name.lower() not in DATASETS:
        table = {"kind": "hf", "path": path or ""}
        fill_in = f"{target}: kind, path and field of the dataset {name!r}, which torchtitan has not defined itself"
        return Translation({target: (table,)}, fill_in=fill_in)
    table = DATASETS[name.lower()]
    is_missing = path is None and name.lower() == "c4_test"
    fill_in = f"{target}: the folder of c4_test is in torchtitan's checkout" if is_missing else ""
    return Translation({target: (table if path is None else table | {"path": path},)}, fill_in=fill_in)


def documents(settings: Settings) -> Translation:
    """Order and separators of documents, which torchtitan has no keys for."""
    has_bos = settings["model.name"].startswith("llama")
    return Translation({"data.shuffle": False, "data.add_bos": has_bos})


def optimizer(settings: Settings) -> Translation:
    """optimizer.name: torch's Adam, of torchtitan, is AdamW only without weight decay."""
    name = settings["optimizer.name"]
    if name in OPTIMIZERS:
        return Translation({"optimizer.name": name})
    if name == "Adam":
        decay = settings["optimizer.weight_decay"]
        lost = f"adds weight_decay = {decay} x weight to the gradient; AdamW decays apart from it" if decay else ""
        return Translation({"optimizer.name": "AdamW"}, "equals Adam if weight_decay is 0", lost=lost)
    fill_in = f"optimizer.name: {', '.join(OPTIMIZERS)}; no counterpart of {name}"
    return Translation({"optimizer.name": ""}, lost="titanlite has " + ", ".join(OPTIMIZERS), fill_in=fill_in)


def weight_decay_skip(settings: Settings) -> Translation:
    """torchtitan decays all parameters."""
    return Translation({"optimizer.weight_decay_skip": ()} if settings["optimizer.weight_decay"] else {})


def _schedule_steps(settings: Settings) -> tuple[int, int]:
    """(steps of torchtitan's schedule, its warm-up): a warm-up is no longer than the schedule."""
    total = settings["lr_scheduler.total_steps"]
    total = settings["training.steps"] if total is None else total
    return total, min(int(settings["lr_scheduler.warmup_steps"]), total)


def warmup(settings: Settings) -> Translation:
    """lr_schedule.warmup_steps."""
    given, (total, steps) = settings["lr_scheduler.warmup_steps"], _schedule_steps(settings)
    remark = (
        f"{given} in the file; torchtitan shortens it to the {total} steps of the schedule" if given > steps else ""
    )
    return Translation({"lr_schedule.warmup_steps": steps}, remark)


def decay(settings: Settings) -> Translation:
    """Shape and length of the decay of the learning rate."""
    steps, ratio, kind = (
        settings[key] for key in ("training.steps", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
    )
    total, warmup_steps = _schedule_steps(settings)
    rest = total - warmup_steps
    length = rest if ratio is None else min(round(total * ratio), rest)
    shape = {"lr_schedule.decay": kind}
    if length == 0:
        return Translation({"lr_schedule.decay": "none"}, "no step is left for a decay")
    if length == rest:  # right after the warm-up, also if the ratio asks for more
        remark = "" if ratio is None else f"decay_ratio = {ratio} leaves no constant learning rate"
        return Translation(shape if total == steps else shape | {"lr_schedule.decay_steps": length}, remark)
    if total == steps:
        return Translation(shape | {"lr_schedule.decay_ratio": float(ratio)})
    if total - length >= steps:
        return Translation({"lr_schedule.decay": "none"}, f"the decay begins after step {steps} of the run")
    lost = (
        f"after a constant learning rate, a decay ends with the run: step {steps}, not lr_scheduler.total_steps = "
        f"{total}; set training.steps = {total} and stop the run at step {steps}"
    )
    return Translation(shape | {"lr_schedule.decay_ratio": float(ratio)}, lost=lost)


def seed(settings: Settings) -> Translation:
    """debug.seed."""
    value = settings["debug.seed"]
    return Translation({} if value is None else {"debug.seed": value})


def mixed_precision(settings: Settings) -> Translation:
    """The dtype of the computation."""
    param, parameters = settings["training.mixed_precision_param"], settings["training.dtype"]
    shard, cp, tp, pp = (
        settings[f"parallelism.{key}_degree"]
        for key in ("data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
    )
    if shard == 1 and cp == 1 and (tp > 1 or pp > 1) and param != parameters:
        remark = f"torchtitan ignores {param} with tp or pp if parameters are not sharded"
        return Translation({"training.mixed_precision_param": parameters}, remark)
    return Translation({"training.mixed_precision_param": param})


def loss_parallel(settings: Settings) -> Translation:
    """parallelism.loss_parallel."""
    return Translation({"parallelism.loss_parallel": not settings["parallelism.disable_loss_parallel"]})


def pipeline_schedule(settings: Settings) -> Translation:
    """parallelism.pp_schedule. torch compares names without case."""
    name = settings["parallelism.pipeline_parallel_schedule"]
    file = settings["parallelism.pipeline_parallel_schedule_csv"]
    known = {schedule.lower(): schedule for schedule in SCHEDULES}
    if file or name.lower() not in known:
        what = f"the schedule of {file}" if file else name
        return Translation(lost=f"no counterpart of {what}; parallelism.pp_schedule is one of {', '.join(SCHEDULES)}")
    return Translation({"parallelism.pp_schedule": known[name.lower()]})


def pipeline_split(settings: Settings) -> Translation:
    """parallelism.pp_split: the first module of each stage except the first one."""
    parts = settings["parallelism.module_fqns_per_model_part"]
    if parts is not None:
        if not all(isinstance(part, list) and part for part in parts):
            return Translation(lost="a part of the model without modules: list the modules of each part")
        first = tuple(str(part[0]) for part in parts[1:])
    else:
        points = settings["parallelism.pipeline_parallel_split_points"]
        first = tuple(points.split(",") if isinstance(points, str) else points)
    if "output" in first:
        return Translation(lost="titanlite keeps output with norm: choose parallelism.pp_split without it")
    return Translation({"parallelism.pp_split": tuple(name for name in first if name)})


def context_parallel(settings: Settings) -> Translation:
    """parallelism.context_parallel."""
    if settings["parallelism.context_parallel_rotate_method"] == "allgather":
        return Translation({"parallelism.context_parallel": "gather"})
    lost = 'titanlite does not rotate keys and values; context_parallel = "heads" exchanges heads for positions'
    return Translation(lost=lost)


def experts(settings: Settings) -> Translation:
    """parallelism.ep."""
    ep, etp, tp = (
        settings[f"parallelism.{key}_degree"]
        for key in ("expert_parallel", "expert_tensor_parallel", "tensor_parallel")
    )
    family, _ = FLAVORS.get((settings["model.name"], settings["model.flavor"]), ("", {}))
    if family in ("llama3", "qwen3") and ep > 1:
        return Translation({"parallelism.ep": 1}, f"torchtitan ignores {ep}: the model has no experts")
    if ep > 1 and tp > 1 and etp == 1:
        remark = f"torchtitan's {ep} includes the ranks of tp, over which titanlite shards each expert"
        return Translation({"parallelism.ep": max(ep // tp, 1)}, remark)
    return Translation({"parallelism.ep": ep})


def loggers(settings: Settings) -> Translation:
    """metrics.loggers."""
    chosen = [name for name in ("tensorboard", "wandb") if settings[f"metrics.enable_{name}"]]
    return Translation({"metrics.loggers": ("console", "jsonl", *chosen)})


def trace_interval(settings: Settings) -> Translation:
    """Interval and wait of [profiling]: torchtitan's trace ends with the interval."""
    interval, warm_up, active = (
        settings[f"profiling.{key}"] for key in ("profile_freq", "profiler_warmup", "profiler_active")
    )
    return Translation({"profiling.interval": interval, "profiling.wait": max(interval - warm_up - active, 0)})


def trace(settings: Settings) -> Translation:
    """profiling.enable_trace; refused by titanlite if the run ends before the first trace."""
    return _within_run(settings, "enable_profiling", "enable_trace")


def memory_snapshot(settings: Settings) -> Translation:
    """profiling.enable_memory_snapshot, as `trace`."""
    return _within_run(settings, "enable_memory_snapshot", "enable_memory_snapshot")


def _within_run(settings: Settings, key: str, target: str) -> Translation:
    interval, steps = settings["profiling.profile_freq"], settings["training.steps"]
    enabled = settings[f"profiling.{key}"]
    remark = f"the run ends before the first one: profile_freq = {interval}" if enabled and interval > steps else ""
    return Translation({f"profiling.{target}": enabled and not remark}, remark)


def recomputation(settings: Settings) -> Translation:
    """Mode and policy of [activation_checkpoint]."""
    mode = settings["activation_checkpoint.mode"]
    option = str(settings["activation_checkpoint.selective_ac_option"])
    values: dict[str, Any] = {"activation_checkpoint.mode": mode}
    if mode != "selective":
        return Translation(values)
    if option == "op":
        return Translation(values | {"activation_checkpoint.selective_policy": "op"})
    if not option.isdecimal():
        return Translation(values, lost='activation_checkpoint.selective_ac_option is neither "op" nor a number')
    every = max(int(option), 1)  # 0 means every block in torchtitan
    policy = {"activation_checkpoint.selective_policy": "layer", "activation_checkpoint.selective_every": every}
    return Translation(values | policy)


def components(settings: Settings) -> Translation:
    """compile.components."""
    given = settings["compile.components"]
    other = [name for name in given if name not in ("model", "loss")]
    lost = f"titanlite compiles model and loss, not {', '.join(other)}" if other else ""
    return Translation({"compile.components": tuple(name for name in given if name not in other)}, lost=lost)


def initial_load(settings: Settings) -> Translation:
    """checkpoint.initial_load_path and initial_load_model_only."""
    path, in_hf = settings["checkpoint.initial_load_path"], settings["checkpoint.initial_load_in_hf"]
    if not (path or in_hf):
        return Translation()
    if not settings["checkpoint.enable"]:
        return Translation(lost="torchtitan loads nothing without checkpoint.enable = true")
    if in_hf:
        source = path or settings["model.tokenizer_path"] or settings["model.hf_assets_path"]
        return Translation({"checkpoint.initial_load_path": f"hf:{source}"})
    lost = ""
    if not settings["checkpoint.initial_load_model_only"]:
        lost = "optimizer state, step and position in the data of a torchtitan checkpoint cannot be read"
    fill_in = (
        "checkpoint.initial_load_path: the folder of that model in the Hugging Face format, which torchtitan's script "
        "convert_to_hf.py writes; its own checkpoints cannot be read"
    )
    return Translation({"checkpoint.initial_load_path": f"hf:{path}"}, lost=lost, fill_in=fill_in)


def load_step(settings: Settings) -> Translation:
    """checkpoint.load_step, which has no effect in torchtitan, and is refused by titanlite, without checkpoints."""
    step = settings["checkpoint.load_step"]
    if step != -1 and not settings["checkpoint.enable"]:
        return Translation(lost="torchtitan loads nothing without checkpoint.enable = true")
    return Translation({"checkpoint.load_step": step})


def validation_steps(settings: Settings) -> Translation:
    """validation.steps: as many sequences, in batches of the training."""
    steps = settings["validation.steps"]
    if steps == -1:
        return Translation({"validation.steps": -1})
    rows, batch = settings["validation.local_batch_size"], settings["training.global_batch_size"]
    shard = settings["parallelism.data_parallel_shard_degree"]
    degree = settings["parallelism.data_parallel_replicate_degree"] * shard
    if batch == -1:
        return Translation({"validation.steps": math.ceil(steps * rows / settings["training.local_batch_size"])})
    if shard != -1:
        return Translation({"validation.steps": math.ceil(steps * rows * degree / batch)})
    remark = f"as many, of {batch} sequences; in torchtitan, of {rows} x the number of data ranks, which the file lacks"
    return Translation({"validation.steps": steps}, remark)
