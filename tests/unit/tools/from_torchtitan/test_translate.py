"""Translated configurations of torchtitan 0.2 have its meaning, and name every key that they leave out."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.keys import full_keys
from titanlite.config.load import load_config, parse_config
from titanlite.config.schema import JobConfig
from titanlite.models.registry import FAMILIES, resolve_model
from titanlite.optim.schedule import build_schedule
from titanlite.runtime.errors import ConfigError
from titanlite.tools.from_torchtitan.conversions import FLAVORS
from titanlite.tools.from_torchtitan.page import document
from titanlite.tools.from_torchtitan.table import RENAMED, RULES
from titanlite.tools.from_torchtitan.translate import DEFAULTS, translate

ROOT = Path(__file__).parents[4]

PIPELINED = """
[job]
dump_folder = "runs/seventy"
[model]
flavor = "70B"
hf_assets_path = "assets/seventy"
converters = ["float8"]
[optimizer]
lr = 1.5e-4
[lr_scheduler]
warmup_steps = 60
decay_ratio = 0.25
decay_type = "cosine"
min_lr_factor = 0.1
[training]
dataset = "c4"
local_batch_size = 8
global_batch_size = 64
seq_len = 4096
steps = 400
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved1f1b"
enable_async_tensor_parallel = true
[checkpoint]
enable = true
interval = 100
last_save_model_only = false
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model"]
[quantize.linear.float8]
recipe_name = "rowwise"
"""


def parsed(text: str, folder: Path) -> JobConfig:
    """The configuration of a translated text, whose names and types must be valid."""
    file = folder / "translated.toml"
    file.write_text(text, encoding="utf-8")
    config, problems = parse_config(["--job.config_file", str(file)])
    assert problems == []
    return config


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """A document from values by full key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        table = found
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
    return found


def value_of(config: JobConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    if section == "model":
        family, model = resolve_model(config.model)
        return {"family": family.name, "flavor": config.model.flavor}.get(name, getattr(model, name, None))
    return getattr(getattr(config, section), name)


def as_keys(text: str) -> set[str]:
    return {f"{section}.{name}" for section, table in tomllib.loads(text).items() for name in table}


def test_a_pipelined_run_has_the_same_meaning_on_its_ranks(tmp_path: Path) -> None:
    found = translate(tomllib.loads(PIPELINED), "seventy.toml")
    file = tmp_path / "my.toml"
    file.write_text(found.text)
    argv = ["--job.config_file", str(file)]
    config = load_config(argv, world_size=16, device_type="cuda", checks_files=False)
    layout, training = config.parallelism, config.training
    assert (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp) == (1, 4, 1, 2, 2)
    assert (layout.pp_schedule, layout.pp_microbatch_size) == ("Interleaved1F1B", 1)
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (8, 64, 4096)
    assert (config.model.family, config.model.flavor, config.tokenizer.path) == ("llama3", "70B", "assets/seventy")
    assert (config.compile.enable, config.compile.components) == (True, ("model",))
    assert (config.checkpoint.interval, config.checkpoint.last_save_model_only) == (100, False)
    (source,) = config.data.sources
    assert (source.kind, source.path, source.subset, source.split) == ("hf", "allenai/c4", "en", "train")
    assert [line.partition(" = ")[0] for line in found.lost] == [
        "model.converters",
        "parallelism.enable_async_tensor_parallel",
        "quantize.linear.float8.recipe_name",
    ]
    assert (found.fill_in, found.unknown) == ([], [])
    with pytest.raises(ConfigError, match=r"parallelism\.dp_shard"):
        load_config(argv, world_size=12, device_type="cuda", checks_files=False)


@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (4, 32)])
def test_defaults_of_torchtitan_are_written(ranks: int, batch: int, tmp_path: Path) -> None:
    found = translate({}, "empty.toml")
    (tmp_path / "my.toml").write_text(found.text)
    argv = ["--job.config_file", str(tmp_path / "my.toml")]
    config = load_config(argv, world_size=ranks, device_type="cpu", checks_files=False)
    training, optimizer = config.training, config.optimizer
    assert (training.global_batch_size, training.seq_len, training.steps) == (batch, 2048, 10000)
    assert (training.mixed_precision_param, training.mixed_precision_reduce) == ("bfloat16", "float32")
    assert (optimizer.name, optimizer.lr, optimizer.beta1, optimizer.beta2) == ("AdamW", 8e-4, 0.9, 0.95)
    assert (optimizer.eps, optimizer.weight_decay, optimizer.weight_decay_skip) == (1e-8, 0.1, ())
    assert (config.lr_schedule.warmup_steps, config.lr_schedule.min_lr_factor) == (200, 0.0)
    recompute = config.activation_checkpoint
    assert (recompute.mode, recompute.selective_policy, recompute.selective_every) == ("selective", "layer", 2)
    assert (value_of(config, "model.vocab_size"), value_of(config, "model.rope_scaling_factor")) == (2048, 8.0)
    assert (config.data.add_bos, config.data.add_eos, config.data.shuffle) == (True, True, False)
    assert as_keys(found.text) & {"validation.interval", "profiling.interval", "data.num_workers"} == set()
    assert [text.partition(":")[0] for text in found.fill_in] == ["tokenizer.path", "data.sources"]
    assert "lr = 0.0008  # torchtitan's default" in found.text


MASKED = {"model.family": "llama3", "model.flavor": "8B", "data.document_mask": True}
ON = {"checkpoint.enable": True}
VALID = {"validation.enable": True}
PROFILED = {"profiling.enable_profiling": True}

CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("job.dump_folder", "elsewhere", {}, {"job.dump_folder": "elsewhere"}),
    ("job.description", 'a "quoted"\nline', {}, {"job.description": 'a "quoted"\nline'}),
    ("model.name", "qwen3", {"model.flavor": "0.6B"}, {"model.family": "qwen3", "data.add_bos": False}),
    ("model.flavor", "8B_varlen", {}, MASKED),
    ("model.flavor", "8B", {"training.seq_len": 262144}, {"model.max_seq_len": 262144}),
    ("model.hf_assets_path", "a", {}, {"tokenizer.path": "a"}),
    ("model.tokenizer_path", "b", {"model.hf_assets_path": "a"}, {"tokenizer.path": "b"}),
    ("training.dataloader.num_workers", 3, {}, {"data.num_workers": 3}),
    ("training.steps", 77, {}, {"training.steps": 77, "lr_schedule.warmup_steps": 77}),
    ("training.local_batch_size", 3, {}, {"training.local_batch_size": 3, "training.global_batch_size": -1}),
    ("training.global_batch_size", 96, {}, {"training.local_batch_size": 8, "training.global_batch_size": 96}),
    ("training.seq_len", 640, {}, {"training.seq_len": 640}),
    ("training.max_norm", 2, {}, {"training.max_norm": 2.0}),
    ("training.dtype", "bfloat16", {}, {"training.dtype": "bfloat16"}),
    ("training.mixed_precision_param", "float32", {}, {"training.mixed_precision_param": "float32"}),
    (
        "parallelism.tensor_parallel_degree",
        2,
        {"parallelism.data_parallel_shard_degree": 1},
        {"parallelism.tp": 2, "training.mixed_precision_param": "float32"},
    ),
    ("training.mixed_precision_reduce", "float32", {}, {"training.mixed_precision_reduce": "float32"}),
    ("training.gc_freq", 9, {}, {"training.gc_freq": 9}),
    ("optimizer.name", "Adam", {"optimizer.weight_decay": 0.0}, {"optimizer.name": "AdamW"}),
    ("optimizer.lr", 1e-3, {}, {"optimizer.lr": 1e-3}),
    ("optimizer.beta1", 0.8, {}, {"optimizer.beta1": 0.8}),
    ("optimizer.beta2", 0.99, {}, {"optimizer.beta2": 0.99}),
    ("optimizer.eps", 1e-6, {}, {"optimizer.eps": 1e-6}),
    ("optimizer.weight_decay", 0.2, {}, {"optimizer.weight_decay": 0.2, "optimizer.weight_decay_skip": ()}),
    ("optimizer.implementation", "for-loop", {}, {"optimizer.implementation": "for-loop"}),
    ("lr_scheduler.warmup_steps", 5, {}, {"lr_schedule.warmup_steps": 5}),
    ("lr_scheduler.total_steps", 900, {"training.steps": 10}, {"lr_schedule.decay_steps": 700}),
    (
        "lr_scheduler.total_steps",
        900,
        {"training.steps": 10, "lr_scheduler.decay_ratio": 0.1},
        {"lr_schedule.decay": "none"},
    ),
    ("lr_scheduler.decay_ratio", 0.25, {}, {"lr_schedule.decay": "linear", "lr_schedule.decay_ratio": 0.25}),
    ("lr_scheduler.decay_ratio", 0.0, {}, {"lr_schedule.decay": "none"}),
    ("lr_scheduler.decay_type", "sqrt", {}, {"lr_schedule.decay": "sqrt", "lr_schedule.decay_ratio": -1.0}),
    ("lr_scheduler.min_lr_factor", 0.3, {}, {"lr_schedule.min_lr_factor": 0.3}),
    ("parallelism.data_parallel_replicate_degree", 2, {}, {"parallelism.dp_replicate": 2, "parallelism.dp_shard": -1}),
    ("parallelism.data_parallel_shard_degree", 4, {}, {"parallelism.dp_shard": 4, "parallelism.dp_replicate": 1}),
    (
        "parallelism.fsdp_reshard_after_forward",
        "never",
        {},
        {"parallelism.fsdp_reshard_after_forward": "never"},
    ),
    ("parallelism.disable_loss_parallel", True, {}, {"parallelism.loss_parallel": False}),
    ("parallelism.pipeline_parallel_degree", 2, {}, {"parallelism.pp": 2, "parallelism.pp_schedule": "1F1B"}),
    ("parallelism.pipeline_parallel_schedule", "gpipe", {}, {"parallelism.pp_schedule": "GPipe"}),
    ("parallelism.pipeline_parallel_microbatch_size", 2, {}, {"parallelism.pp_microbatch_size": 2}),
    (
        "parallelism.module_fqns_per_model_part",
        [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]],
        {},
        {"parallelism.pp_split": ("layers.1",)},
    ),
    (
        "parallelism.pipeline_parallel_split_points",
        "layers.2,layers.4",
        {},
        {"parallelism.pp_split": ("layers.2", "layers.4")},
    ),
    ("parallelism.context_parallel_degree", 2, {}, {"parallelism.cp": 2}),
    ("parallelism.context_parallel_rotate_method", "allgather", {}, {"parallelism.context_parallel": "gather"}),
    (
        "parallelism.expert_parallel_degree",
        4,
        {"model.name": "qwen3", "model.flavor": "30B-A3B"},
        {"parallelism.ep": 4, "model.family": "qwen3_moe", "model.balance_loss": 0.0},
    ),
    ("parallelism.expert_parallel_degree", 4, {}, {"parallelism.ep": 1}),
    (
        "parallelism.expert_tensor_parallel_degree",
        2,
        {
            "model.name": "qwen3",
            "model.flavor": "debugmodel_moe",
            "parallelism.expert_parallel_degree": 4,
            "parallelism.tensor_parallel_degree": 2,
        },
        {"parallelism.ep": 4, "model.n_experts": 64, "model.n_active_experts": 8, "model.ffn_dim": 768},
    ),
    ("checkpoint.enable", True, {}, {"checkpoint.enable": True, "checkpoint.last_save_model_only": True}),
    ("checkpoint.folder", "saves", {}, {"checkpoint.folder": "saves"}),
    ("checkpoint.interval", 7, {}, {"checkpoint.interval": 7}),
    (
        "checkpoint.initial_load_path",
        "weights",
        {**ON, "checkpoint.initial_load_in_hf": True},
        {"checkpoint.initial_load_path": "hf:weights"},
    ),
    (
        "checkpoint.initial_load_in_hf",
        True,
        {**ON, "model.hf_assets_path": "assets"},
        {"checkpoint.initial_load_path": "hf:assets"},
    ),
    ("checkpoint.initial_load_model_only", True, ON, {"checkpoint.initial_load_model_only": True}),
    ("checkpoint.last_save_model_only", False, ON, {"checkpoint.last_save_model_only": False}),
    ("checkpoint.async_mode", "async", {}, {"checkpoint.async_mode": "async"}),
    ("checkpoint.keep_latest_k", 4, {}, {"checkpoint.keep_latest_k": 4}),
    ("checkpoint.load_step", 20, ON, {"checkpoint.load_step": 20}),
    ("activation_checkpoint.mode", "none", {}, {"activation_checkpoint.mode": "none"}),
    ("activation_checkpoint.selective_ac_option", "op", {}, {"activation_checkpoint.selective_policy": "op"}),
    ("activation_checkpoint.selective_ac_option", "3", {}, {"activation_checkpoint.selective_every": 3}),
    ("activation_checkpoint.memory_budget", 0.25, {}, {"activation_checkpoint.memory_budget": 0.25}),
    ("activation_checkpoint.early_stop", True, {}, {"activation_checkpoint.early_stop": True}),
    ("activation_checkpoint.preserve_rng_state", False, {}, {"activation_checkpoint.preserve_rng_state": False}),
    ("activation_checkpoint.determinism_check", "none", {}, {"activation_checkpoint.determinism_check": "none"}),
    ("activation_checkpoint.debug", True, {}, {"activation_checkpoint.debug": True}),
    ("compile.enable", True, {}, {"compile.enable": True}),
    ("compile.components", ["loss"], {}, {"compile.components": ("loss",)}),
    ("compile.backend", "aot_eager", {}, {"compile.backend": "aot_eager"}),
    ("metrics.log_freq", 3, {}, {"metrics.log_freq": 3}),
    ("metrics.enable_tensorboard", True, {}, {"metrics.loggers": ("console", "jsonl", "tensorboard")}),
    ("metrics.enable_wandb", True, {}, {"metrics.loggers": ("console", "jsonl", "wandb")}),
    ("metrics.save_tb_folder", "board", {}, {"metrics.folder": "board"}),
    ("profiling.enable_profiling", True, {}, {"profiling.enable_trace": True, "profiling.wait": 6}),
    ("profiling.enable_profiling", True, {"training.steps": 9}, {"profiling.enable_trace": False}),
    ("profiling.enable_memory_snapshot", True, {}, {"profiling.enable_memory_snapshot": True}),
    ("profiling.profile_freq", 50, PROFILED, {"profiling.interval": 50, "profiling.wait": 46}),
    ("profiling.profiler_active", 5, PROFILED, {"profiling.active": 5, "profiling.wait": 2}),
    ("profiling.profiler_warmup", 1, PROFILED, {"profiling.warmup": 1, "profiling.wait": 8}),
    ("validation.enable", True, {}, {"validation.enable": True, "validation.interval": 10}),
    ("validation.freq", 25, {}, {"validation.interval": 25}),
    ("validation.steps", 12, VALID | {"training.local_batch_size": 16}, {"validation.steps": 6}),
    (
        "validation.local_batch_size",
        4,
        {
            "validation.steps": 12,
            "training.global_batch_size": 32,
            "parallelism.data_parallel_shard_degree": 4,
            "parallelism.data_parallel_replicate_degree": 1,
        },
        {"validation.steps": 6},
    ),
    ("comm.init_timeout_seconds", 900, {}, {"comm.init_timeout_s": 900}),
    ("comm.train_timeout_seconds", 90, {}, {"comm.train_timeout_s": 90}),
    ("debug.seed", 42, {}, {"debug.seed": 42}),
    ("debug.deterministic", True, {}, {"debug.deterministic": True}),
    ("debug.deterministic_warn_only", True, {}, {"debug.deterministic_warn_only": True}),
]
"""torchtitan's key and value, further settings, and titanlite's values."""


def test_every_key_has_its_meaning(tmp_path: Path) -> None:
    wrong = []
    for key, value, others, expected in CASES:
        found = translate(nested({key: value, **others}), "case.toml")
        config = parsed(found.text, tmp_path)
        wrong += [
            (key, value, name, value_of(config, name)) for name in expected if value_of(config, name) != expected[name]
        ]
        wrong += [(key, found.lost, found.unknown) for _ in (*found.lost, *found.unknown)]
    assert wrong == []
    tested = {key for key, *_ in CASES} | {"training.dataset", "training.dataset_path"}
    tested |= {"validation.dataset", "validation.dataset_path", "parallelism.pipeline_parallel_schedule_csv"}
    assert tested == {key for rule in RULES if rule.targets for key in rule.keys}


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("c4", None, ("hf", "allenai/c4", "en", "train")),
        ("C4_validation", None, ("hf", "allenai/c4", "en", "validation")),
        ("c4", "/data/c4", ("hf", "/data/c4", "en", "train")),
        ("c4_test", "x/c4_test", ("hf", "x/c4_test", "", "train")),
    ],
)
def test_datasets(name: str, path: str | None, expected: tuple[str, ...], tmp_path: Path) -> None:
    keys = {"dataset": name, **({"dataset_path": path} if path else {})}
    found = translate({"training": keys, "validation": keys | {"enable": True}, "model": {"hf_assets_path": "a"}}, "d")
    config = parsed(found.text, tmp_path)
    for sources in (config.data.sources, config.validation.sources):
        assert [(each.kind, each.path, each.subset, each.split) for each in sources] == [expected]
    assert found.fill_in == []


def test_keys_without_counterpart_are_named_with_their_reason(tmp_path: Path) -> None:
    for rule in RULES:
        for key, default in rule.keys.items() if not rule.targets else ():
            other = not default if isinstance(default, bool) else 17
            found = translate(nested({key: other}), "x.toml")
            assert found.lost == [
                f"{key} = {'true' if other is True else 'false' if other is False else 17}: {rule.note}"
            ]
            assert key in found.text
            parsed(found.text, tmp_path)
            if default is not None:
                idle = translate(nested({key: default}), "x.toml")
                assert idle.lost == []
                assert key in idle.text


@pytest.mark.parametrize(
    ("document", "key", "reason"),
    [
        ({"model": {"name": "deepseek_v3", "flavor": "16B"}}, "model.name", "a new family: docs/models.md"),
        ({"optimizer": {"name": "Adam"}}, "optimizer.name", "adds weight_decay = 0.1 x weight to the gradient"),
        ({"parallelism": {"context_parallel_rotate_method": "alltoall"}}, "parallelism.context_parallel", "rotate"),
        ({"parallelism": {"pipeline_parallel_schedule_csv": "s.csv"}}, "parallelism.pipeline_par", "of s.csv"),
        ({"parallelism": {"module_fqns_per_model_part": [["a"], ["output"]]}}, "parallelism.module", "with norm"),
        ({"compile": {"components": ["model", "optimizer"]}}, "compile.components", "not optimizer"),
        ({"checkpoint": {"initial_load_path": "a"}}, "checkpoint.initial_load_path", "checkpoint.enable = true"),
        ({"lr_scheduler": {"total_steps": 20000, "decay_ratio": 0.6}}, "lr_scheduler.total_steps", "stop the run"),
    ],
)
def test_values_without_counterpart(document: dict[str, Any], key: str, reason: str) -> None:
    (text,) = translate(document, "x.toml").lost
    assert text.startswith(key)
    assert reason in text


def test_a_model_or_checkpoint_that_cannot_be_known_is_refused_until_filled_in(tmp_path: Path) -> None:
    found = translate({"model": {"name": "llama4", "flavor": "17bx16e"}}, "x.toml")
    (tmp_path / "my.toml").write_text(found.text)
    _, problems = parse_config(["--job.config_file", str(tmp_path / "my.toml")])
    assert [problem.key for problem in problems] == ["model.family"]
    assert any("model.family and model.flavor: no counterpart of llama4 17bx16e" in text for text in found.fill_in)
    loaded = translate({"checkpoint": {"enable": True, "initial_load_path": "other/step-10"}}, "x.toml")
    assert any(text.startswith("checkpoint.initial_load_path: the folder") for text in loaded.fill_in)
    assert parsed(loaded.text, tmp_path).checkpoint.initial_load_path == "hf:other/step-10"


def torchtitan_factor(step: int, warmup: int, total: int, ratio: float | None, shape: str, lowest: float) -> float:
    """The factor of the learning rate in `step`, from 1, as torchtitan documents it: constant until one step later."""
    warmup = min(warmup, total)
    length = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if step <= warmup:
        return step / warmup
    begin = total + 1 - length
    if step <= begin:
        return 1.0
    progress = (step - begin) / length
    fall = {"linear": progress, "sqrt": math.sqrt(progress), "cosine": (1 - math.cos(math.pi * progress)) / 2}[shape]
    return lowest + (1 - lowest) * (1 - fall)


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize(
    ("steps", "total", "warmup", "ratio"),
    [
        (40, None, 10, None),
        (40, None, 10, 0.2),
        (40, None, 30, 0.5),
        (30, None, 200, 0.1),
        (20, 50, 5, None),
        (40, None, 0, 1.0),
    ],
)
def test_learning_rates_are_those_of_torchtitan_one_step_earlier(
    steps: int, total: int | None, warmup: int, ratio: float | None, shape: str, tmp_path: Path
) -> None:
    given = {"warmup_steps": warmup, "decay_type": shape, "min_lr_factor": 0.1}
    given |= {} if ratio is None else {"decay_ratio": ratio}
    given |= {} if total is None else {"total_steps": total}
    config = parsed(translate({"lr_scheduler": given, "training": {"steps": steps}}, "x.toml").text, tmp_path)
    ours = build_schedule(config.lr_schedule, 1.0, steps)
    for step in range(1, steps + 1):
        later = step + (step > min(warmup, total or steps))
        theirs = torchtitan_factor(later, warmup, total or steps, ratio, shape, 0.1)
        assert ours(step) == pytest.approx(theirs), step


def test_older_names_are_read(tmp_path: Path) -> None:
    old = {
        "training": {"batch_size": 3, "seed": 5, "compile": True, "tensor_parallel_degree": 2},
        "experimental": {"pipeline_parallel_degree": 4},
        "checkpoint": {"enable_checkpoint": True},
        "lr_scheduler": {"lr_min": 0.5, "min_lr_factor": 0.25},
    }
    found = translate(old, "old.toml")
    config = parsed(found.text, tmp_path)
    assert (config.training.local_batch_size, config.debug.seed, config.compile.enable) == (3, 5, True)
    assert (config.parallelism.tp, config.parallelism.pp, config.checkpoint.enable) == (2, 4, True)
    assert config.lr_schedule.min_lr_factor == 0.25
    assert "#   training.batch_size: in 0.2.2, training.local_batch_size\n" in found.text
    assert "lr_scheduler.lr_min: in 0.2.2, lr_scheduler.min_lr_factor, which the file has, too: ignored" in found.text


def test_unknown_keys_are_named() -> None:
    document = {"training": {"stepz": 4, "enable": True}, "optimzer": {"lr": 1.0}, "own": {"a": {"b": 1979}}, "x": 1}
    assert translate(document, "x.toml").unknown == [
        "training.stepz = 4 (did you mean training.steps?)",
        "training.enable = true (did you mean checkpoint.enable?)",
        "optimzer.lr = 1.0 (did you mean optimizer.lr?)",
        "own.a.b = 1979",
        "x = 1",
    ]


def test_values_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        translate({"training": {"steps": "many", "max_norm": True}, "debug": {"seed": 1.5}}, "x.toml")
    assert {problem.key for problem in caught.value.problems} == {"training.steps", "training.max_norm", "debug.seed"}
    with pytest.raises(ConfigError, match=r"training\.local_batch_size = 0"):
        translate({"training": {"local_batch_size": 0}}, "x.toml")


def test_the_table_is_consistent() -> None:
    keys = [key for rule in RULES for key in rule.keys]
    assert len(set(keys)) == len(keys)
    known = {key for family in FAMILIES for key in full_keys(family)} | {"data.sources", "validation.sources"}
    assert [target for rule in RULES for target in rule.targets if target not in known] == []
    assert [old for old, new in RENAMED.items() if old in DEFAULTS or new not in DEFAULTS] == []
    for family, values in FLAVORS.values():
        assert set(values) - {"flavor"} <= {key.rpartition(".")[2] for key in full_keys(family)}


def test_the_documentation_is_current() -> None:
    current = (ROOT / "docs" / "from-torchtitan.md").read_text(encoding="utf-8")
    assert current == document(), "run: python -m titanlite.tools.from_torchtitan.page > docs/from-torchtitan.md"
