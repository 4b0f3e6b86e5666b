"""Settings without effect: each conditional key with settings under which it has an effect, and others without."""

from pathlib import Path

import pytest

from titanlite.config.fields import SECTIONS, columns_of, keys_of
from titanlite.config.files import shipped_names
from titanlite.config.ineffective import ACROSS, describe
from titanlite.config.load import load_config, parse, without_effect
from titanlite.config.schema import StageConfig
from titanlite.config.toml import dump_config
from titanlite.config.values import full_keys
from titanlite.data.check import has_key
from titanlite.data.kinds import KINDS
from titanlite.data.sources.config import SourceConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError

PLUGINS = Path(__file__).parents[3] / "examples" / "plugins.toml"
ALWAYS = {
    *("job.dump_folder", "job.description", "job.plugins", "job.take_over"),
    *(
        *("model.family", "model.flavor", "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads"),
        "model.ffn_dim",
    ),
    *("model.vocab_size", "model.head_dim", "model.norm_eps", "model.rope_theta", "model.rope_scaling_factor"),
    *(
        "model.max_seq_len",
        "model.tie_embeddings",
        "model.base_dim",
        "model.base_layers",
        "model.init_std",
        "model.init_by_depth",
        "model.n_experts",
        "model.n_active_experts",
        "model.balance_loss",
    ),
    *(
        "model.z_loss",
        "model.bias_rate",
        "model.n_further_tokens",
        "model.no_rope_interval",
        "model.full_interval",
        "model.sliding_window",
    ),
    *("model.query_pre_attn_scalar", "model.score_cap", "model.logit_cap", "model.rope_local_theta"),
    "model.partial_rotary_factor",
    *("model.q_lora_rank", "model.kv_lora_rank", "model.qk_nope_head_dim", "model.qk_rope_head_dim"),
    *("model.v_head_dim", "model.n_dense_layers", "model.n_shared_experts", "model.n_groups", "model.route_scale"),
    # eos also stops the texts that the run's model generates later, and exported models name all
    *("tokenizer.path", "tokenizer.bos", "tokenizer.eos", "tokenizer.chat_template"),
    "data.add_bos",  # also of prompts, tasks and exports
    *("data.num_streams", "data.shuffle", "data.document_mask", "data.num_workers", "data.ledger"),
    *("data.sources.kind", "data.sources.name", "data.sources.epochs"),
    # refused in [validation], if it is enabled
    *("validation.enable", "validation.sources.kind", "validation.sources.name", "validation.sources.epochs"),
    "validation.sources.weight",
    *("training.steps", "training.tokens", "training.seq_len", "training.global_batch_size", "training.max_norm"),
    # also of the norm that is logged
    *("training.bit_equal", "training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce"),
    *(f"parallelism.{key}" for key in ("layout", "dp_replicate", "dp_shard", "cp", "ep", "tp", "pp")),
    *(
        "activation_checkpoint.mode",
        "compile.enable",
        "float8.recipe",
        "loss.name",
        "loss.z_loss",
        "loss.terms",
        "loss.chunk_tokens",
    ),
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.ema_decay", "optimizer.qk_clip"),
    # refused, if the optimizer of the group lacks them
    *(f"optimizer.groups.{key}" for key in ("parameters", "optimizer", "lr_factor", "weight_decay")),
    *("optimizer.groups.beta2", "lr_schedule.warmup_steps"),
    *("checkpoint.enable", "checkpoint.initial_load_path"),
    # skipped spikes count as well
    *("faults.max_skipped_steps", "faults.spike_factor"),
    *("memory.check", "metrics.log_freq", "metrics.loggers", "metrics.statistics"),
    *("profiling.enable_trace", "profiling.enable_memory_snapshot", "samples.prompts"),
    *("debug.seed", "debug.deterministic", "comm.init_timeout_s", "comm.train_timeout_s"),
}
"""Keys that have an effect under any valid settings."""


def test_every_key_has_a_rule_or_always_an_effect() -> None:
    """A new key belongs into NEEDS of its section, or into ALWAYS above."""
    keys = {key.replace(".0.", ".") for family in FAMILIES for key in full_keys(family)}
    conditional = {
        f"{section}.{name}" for section in SECTIONS for name, key in keys_of(section, None).items() if key.setting.needs
    }
    of_kinds = [key for key in columns_of(SourceConfig) if any(has_key(kind, key) for kind in KINDS.values())]
    conditional |= {f"{section}.sources.{key}" for section in ("data", "validation") for key in of_kinds}
    conditional |= {*ACROSS, "data.sources.weight", *(f"training.stages.{key}" for key in columns_of(StageConfig))}
    conditional |= {f"model.{key}" for family in FAMILIES.values() for key in family.needs}
    assert sorted(keys - ALWAYS - conditional) == []
    assert sorted(ALWAYS & conditional) == []
    assert (ALWAYS | conditional) - keys == {"validation.sources"}  # an array, with its tables


def keys_without_effect(*argv: str, world_size: int = 1) -> set[str]:
    config = load_config(argv, world_size=world_size, device_type="cpu", checks_files=False)
    return {problem.key for problem in without_effect(parse(argv), config, world_size)}


PP = "--parallelism.pp 2 --training.local_batch_size 2 --training.global_batch_size 8"
MUON = "--optimizer.name Muon"
SGD = "--optimizer.name SGD"
ROPE = "--model.rope_scaling_factor 8"
TEXT = "--data.sources.0.kind text --data.sources.0.path x --tokenizer.path t"
TOKENS = "--data.sources.0.kind tokens --data.sources.0.path x.npy"
TWO = "--data.sources.0.weight 1 --data.sources.1.kind python-stdlib --data.sources.1.weight 2"
BATCH = "--training.global_batch_size 16"
SAVE, LOAD = "--checkpoint.enable", "--checkpoint.initial_load_path hf:x"
LONGER = "--training.stages.0.seq_len 64"
STAGE = f"--training.stages.0.from_step 9 {LONGER}"
SAMPLES = '--samples.prompts ["a"]'
VALIDATE = "--validation.enable --validation.sources.0.kind python-stdlib"
CASES = [
    # setting, settings under which it has an effect, settings under which it has none, processes
    ("model.rope_low_freq_factor 1.5", ROPE, "", 1),
    ("model.rope_beta_fast 31", f"--model.family qwen3 {ROPE}", "--model.family qwen3", 1),
    ("data.seed 1", "", "--data.shuffle false", 1),
    ("data.seed 1", f"--data.shuffle false {TWO}", "--data.shuffle false", 1),
    ("data.max_piece_bytes 100", TEXT, TOKENS, 1),
    ("data.packing concatenate", TEXT, TOKENS, 1),
    ("data.on_bad_row skip", TEXT, TOKENS, 1),
    ("data.max_bad_rows 5", "--data.on_bad_row skip", "", 1),
    ("data.add_eos false", TEXT, TOKENS, 1),
    ("data.sources.0.weight 1.0", "--data.sources.1.kind python-stdlib --data.sources.1.weight 2", "", 1),
    ("data.sources.0.streaming true", "--data.sources.0.kind hf --data.sources.0.path x --tokenizer.path t", TEXT, 1),
    ("validation.interval 5", VALIDATE, "", 1),
    ("validation.sources.0.split validation", VALIDATE, "--validation.enable false", 1),
    ("training.local_batch_size 2", "", "--parallelism.pp 2 --training.global_batch_size 8", 2),
    ("parallelism.hardware h100", f"--parallelism.layout auto {BATCH}", "", 1),
    ("parallelism.context_parallel heads", "--parallelism.cp 2", "", 2),
    ("parallelism.pp_schedule 1F1B", PP, "", 2),
    ("parallelism.pp_split []", PP, "", 2),
    (
        "parallelism.gradient_sync every",
        f"{BATCH} --training.local_batch_size 4",
        f"{BATCH} --training.local_batch_size 8",
        2,
    ),
    ("parallelism.gradient_sync every", PP, f"{BATCH} --parallelism.tp 2", 2),
    (
        "parallelism.gradient_sync every",
        f"{BATCH} --parallelism.dp_replicate 2 --training.local_batch_size 4",
        BATCH,
        2,
    ),
    ("parallelism.fsdp_reshard_after_forward never", "", "--parallelism.dp_replicate 2", 2),
    ("activation_checkpoint.selective_policy op", "--activation_checkpoint.mode selective", "", 1),
    ("activation_checkpoint.memory_budget 0.4", "--activation_checkpoint.mode memory_budget --compile.enable", "", 1),
    ("activation_checkpoint.early_stop false", "--activation_checkpoint.mode full", "", 1),
    ("compile.backend eager", "--compile.enable", "", 1),
    ("float8.scale floor", "--float8.recipe rowwise", "", 1),
    ("optimizer.beta1 0.8", MUON, SGD, 1),
    ("optimizer.eps 1e-7", MUON, "--optimizer.name Lion", 1),
    ("optimizer.state_rounding nearest", "--optimizer.state_dtype bfloat16", "", 1),
    ("optimizer.adjust_lr original", MUON, SGD, 1),
    ("optimizer.normuon_beta2 0.9", MUON, SGD, 1),
    ("optimizer.orthogonalization polar_express", MUON, "", 1),
    (
        "optimizer.newton_schulz_coefficients [3,-3.2,1.2]",
        MUON,
        f"{MUON} --optimizer.orthogonalization polar_express",
        1,
    ),
    ("optimizer.cautious_weight_decay true", "", SGD, 1),
    ("optimizer.cautious_weight_decay true", MUON, f"{MUON} --optimizer.weight_decay 0", 1),
    ("optimizer.weight_decay_skip []", "", "--optimizer.weight_decay 0", 1),
    ("lr_schedule.decay_steps 5", "", "--lr_schedule.decay none", 1),
    ("lr_schedule.final_decay_steps 5", "", "--lr_schedule.min_lr_factor 1", 1),
    ("lr_schedule.min_lr_factor 0.2", "", "--lr_schedule.decay none", 1),
    ("lr_schedule.decay cosine", "", "--lr_schedule.min_lr_factor 1", 1),
    ("lr_schedule.over tokens", STAGE, "", 1),
    ("training.stages.0.from_step 9", f"{LONGER} --training.steps 9", f"{LONGER} --training.steps 8", 1),
    ("checkpoint.interval 5", SAVE, "", 1),
    ("checkpoint.keep_every 5", SAVE, f"{SAVE} --checkpoint.keep_latest_k 0", 1),
    ("checkpoint.initial_load_model_only true", LOAD, SAVE, 1),
    ("faults.on_spike skip", "--faults.spike_factor 8", "", 1),
    ("faults.check_replicas_every 5", "", PP, 2),
    ('metrics.columns ["mfu"]', '--metrics.loggers ["jsonl","console"]', '--metrics.loggers ["jsonl"]', 1),
    ("metrics.group x", '--metrics.loggers ["jsonl","wandb"]', "", 1),
    ("profiling.interval 100", "--profiling.enable_trace", "", 1),
    ("samples.interval 5", SAMPLES, "", 1),
    ("comm.save_timeout_s 5", SAVE, "", 1),
    ("storage.timeout_s 5", "--checkpoint.initial_load_path s3://bucket/run", "", 1),
]


@pytest.mark.parametrize(("setting", "used", "unused", "world_size"), CASES, ids=[case[0] for case in CASES])
def test_a_setting_is_named_only_if_it_has_no_effect(setting: str, used: str, unused: str, world_size: int) -> None:
    key, value = setting.split(" ")
    named = "validation.sources" if key.startswith("validation.sources") else key
    assert named not in keys_without_effect(*used.split(), f"--{key}", value, world_size=world_size)
    found = keys_without_effect(*unused.split(), f"--{key}", value, world_size=world_size)
    if named == key:
        assert named in found
    assert not {other for other in found if f"--{other}" not in f"--{key} {unused}"}


def test_tables_of_validation_that_is_not_enabled_are_one_setting(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[[validation.sources]]\nkind = 'text'\npath = 'x'\n")
    argv = [str(file)]
    config = load_config(argv, world_size=1, device_type="cpu", checks_files=False)
    (problem,) = without_effect(parse(argv), config, 1)
    assert describe(problem) == "validation.sources has an effect only with validation.enable = true"
    assert str(problem).splitlines()[0] == "validation.sources"


def test_a_search_of_layouts_may_use_any_setting() -> None:
    argv = "--parallelism.pp_schedule GPipe --activation_checkpoint.selective_policy layer"
    argv += f" --faults.check_replicas_every 5 --parallelism.layout auto {BATCH}"
    assert keys_without_effect(*argv.split(), world_size=4) == set()
    load_config([*argv.split(), "--strict"], world_size=4, device_type="cpu", checks_files=False)


@pytest.mark.usefixtures("registries")
def test_optimizers_and_loggers_of_plugins_may_use_any_setting() -> None:
    optimizer = "--optimizer.eps 1e-6 --optimizer.beta1 0.8"
    logger = '--metrics.project p --metrics.tags ["t"]'
    assert keys_without_effect(str(PLUGINS), *optimizer.split(), *logger.split()) == set()
    own = ["--optimizer.name", "SGD", "--metrics.loggers", '["jsonl"]']
    assert len(keys_without_effect(str(PLUGINS), *optimizer.split(), *logger.split(), *own)) == 4


def test_defaults_automatic_values_and_written_files_are_not_named(tmp_path: Path) -> None:
    assert keys_without_effect() == set()
    assert keys_without_effect("--lr_schedule.decay", "none", "--lr_schedule.decay_steps=-1") == set()
    file = tmp_path / "config.toml"
    file.write_text(dump_config(load_config([], world_size=1, device_type="cpu")))
    assert keys_without_effect(str(file)) == set()
    assert keys_without_effect(str(file), "--parallelism.pp_schedule", "GPipe") == {"parallelism.pp_schedule"}


@pytest.mark.parametrize("name", shipped_names())
def test_all_settings_of_shipped_configurations_have_an_effect(name: str) -> None:
    world_size = {"quickstart": 1, "llama3_8b_one_gpu": 1, "qwen3_0_6b": 1}.get(name, 128)
    config = load_config([name], world_size=world_size, device_type="cuda", checks_files=False)
    assert without_effect(parse([name]), config, world_size) == []


def test_strict_refuses_settings_without_effect(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[parallelism]\npp_schedule = 'GPipe'")
    (tmp_path / "my.toml").write_text("extends = 'base.toml'")
    argv = [str(tmp_path / "my.toml"), "--optimizer.adjust_lr", "original"]
    config = load_config(argv, world_size=1, device_type="cpu")
    assert describe(without_effect(parse(argv), config, 1)[0]) == (
        f'parallelism.pp_schedule = "GPipe" in {tmp_path / "base.toml"} has an effect only with parallelism.pp above 1'
    )
    with pytest.raises(ConfigError) as caught:
        load_config([*argv, "--strict"], world_size=1, device_type="cpu")
    assert [problem.key for problem in caught.value.problems] == ["parallelism.pp_schedule", "optimizer.adjust_lr"]
    assert [problem.remedy for problem in caught.value.problems] == [
        f"leave it out of {tmp_path / 'base.toml'}, or extend another file",
        "leave it out",
    ]
    assert load_config(
        [argv[0], "--parallelism.pp_schedule=1F1B", "--parallelism.pp=2", "--strict"], world_size=2, device_type="cpu"
    )
