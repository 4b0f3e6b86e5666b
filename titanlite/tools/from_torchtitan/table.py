"""The meaning of every key of torchtitan 0.2. docs/from-torchtitan.md is written from this table.

Names, defaults and meanings are those of the published versions 0.2.0 to 0.2.2; defaults that differ are of 0.2.2.
"""

from titanlite.tools.from_torchtitan import conversions
from titanlite.tools.from_torchtitan.rules import Rule, absent, renamed, same

RULES: tuple[Rule, ...] = (
    # job
    same("job.dump_folder", "./outputs", "Choose another folder than that of a torchtitan run.", fills=False),
    same("job.description", "default job", fills=False),
    absent({"job.config_file": None}, "It is the first argument of the command: `titanlite train my.toml`."),
    absent(
        {"job.print_config": False, "job.save_config_file": None},
        "titanlite train my.toml --print-config; each run writes its configuration to config.toml in its dump folder.",
    ),
    absent({"job.custom_config_module": ""}, "Code for torchtitan: see docs/plugins.md."),
    # model
    Rule(
        {"model.name": "llama3", "model.flavor": "debugmodel"},
        ("model.family", "model.flavor", "data.document_mask"),
        "Sizes that titanlite's flavor does not have are set one by one. The flavors flex and varlen, with attention "
        "inside documents, set data.document_mask.",
        conversions.model,
    ),
    Rule(
        {"model.hf_assets_path": "./tests/assets/tokenizer", "model.tokenizer_path": None},
        ("tokenizer.path",),
        "A tokenizer.json, or its folder. Relative paths start at the current folder.",
        conversions.tokenizer,
    ),
    absent(
        {"model.converters": []},
        "No float8 and no MX formats: the run computes in training.mixed_precision_param.",
    ),
    absent({"model.print_after_conversion": False}, "The start log lists what is applied to the model."),
    # data
    Rule(
        {"training.dataset": "c4_test", "training.dataset_path": None},
        ("data.sources",),
        "torchtitan names a dataset; titanlite describes it.",
        conversions.sources,
    ),
    Rule(
        {},
        ("data.shuffle", "data.add_bos"),
        "torchtitan does not shuffle text, and adds BOS and EOS to each document if the tokenizer has them. titanlite "
        "can shuffle documents, which helps if neighbors are similar.",
        conversions.documents,
    ),
    renamed("training.dataloader.num_workers", 0, "data.num_workers", "Each rank has so many, in both.", fills=False),
    absent(
        {
            "training.dataloader.persistent_workers": False,
            "training.dataloader.pin_memory": False,
            "training.dataloader.prefetch_factor": None,
        },
        "Workers live as long as the run, and prepare steps in advance.",
    ),
    # training
    same("training.steps", 10000, "Optimizer steps of the entire run, also after a resume, in both."),
    same(
        "training.local_batch_size",
        8,
        "Sequences per rank and microbatch. With a pipeline, in both, pipeline_parallel_microbatch_size divides it "
        "further; titanlite sends all local batches of a step through the pipeline at once, unless "
        'parallelism.gradient_sync = "every".',
    ),
    same(
        "training.global_batch_size",
        -1,
        "-1: local_batch_size x data-parallel ranks, in both. titanlite keeps the number of the first start, so that a "
        "run resumes on other ranks with the same batch.",
    ),
    same("training.seq_len", 2048),
    same("training.max_norm", 1.0, "See 'loss' above: clipping depends on the scale of the gradients."),
    same("training.dtype", "float32"),
    Rule(
        {"training.mixed_precision_param": "bfloat16"},
        ("training.mixed_precision_param",),
        "Also on CPUs. Without sharding, torchtitan uses autocast, or with tp or pp computes in training.dtype; "
        "titanlite casts as with sharding, on every mesh.",
        conversions.mixed_precision,
    ),
    same("training.mixed_precision_reduce", "float32"),
    same("training.gc_freq", 50),
    absent({"training.gc_debug": False}, "See `titanlite profile` and docs/profiling.md for memory."),
    absent(
        {"training.enable_cpu_offload": False},
        "Nothing is offloaded: use more shards, a smaller local_batch_size or activation checkpointing; `titanlite "
        "plan` estimates the memory.",
    ),
    # optimizer
    Rule(
        {"optimizer.name": "AdamW"},
        ("optimizer.name",),
        convert=conversions.optimizer,
    ),
    same("optimizer.lr", 8e-4),
    same("optimizer.beta1", 0.9),
    same("optimizer.beta2", 0.95),
    same("optimizer.eps", 1e-8),
    same("optimizer.weight_decay", 0.1),
    Rule(
        {},
        ("optimizer.weight_decay_skip",),
        "torchtitan decays all parameters; titanlite's default leaves out norms and biases.",
        conversions.weight_decay_skip,
    ),
    same("optimizer.implementation", "fused", fills=False),
    absent(
        {"optimizer.early_step_in_backward": False},
        "All gradients exist before the update, since clipping and the check for NaN need them: plan their memory.",
    ),
    # lr_scheduler
    Rule(
        {"lr_scheduler.warmup_steps": 200},
        ("lr_schedule.warmup_steps",),
        convert=conversions.warmup,
    ),
    Rule(
        {
            "lr_scheduler.total_steps": None,
            "lr_scheduler.decay_ratio": None,
            "lr_scheduler.decay_type": "linear",
        },
        ("lr_schedule.decay", "lr_schedule.decay_ratio", "lr_schedule.decay_steps"),
        "Without decay_ratio, the decay begins after the warm-up, in both. See 'learning rate' above.",
        conversions.decay,
    ),
    renamed("lr_scheduler.min_lr_factor", 0.0, "lr_schedule.min_lr_factor"),
    # parallelism
    renamed("parallelism.data_parallel_replicate_degree", 1, "parallelism.dp_replicate"),
    renamed("parallelism.data_parallel_shard_degree", -1, "parallelism.dp_shard", "-1: the remaining ranks, in both."),
    same("parallelism.fsdp_reshard_after_forward", "default"),
    renamed("parallelism.tensor_parallel_degree", 1, "parallelism.tp"),
    Rule(
        {"parallelism.disable_loss_parallel": False},
        ("parallelism.loss_parallel",),
        "The opposite value.",
        conversions.loss_parallel,
    ),
    absent(
        {"parallelism.enable_async_tensor_parallel": False},
        "Collectives of tp do not overlap with matrix products: measure with a smaller tp and more dp_shard.",
    ),
    renamed("parallelism.pipeline_parallel_degree", 1, "parallelism.pp"),
    Rule(
        {"parallelism.pipeline_parallel_schedule": "1F1B", "parallelism.pipeline_parallel_schedule_csv": ""},
        ("parallelism.pp_schedule",),
        "Schedules with several stages have two per rank.",
        conversions.pipeline_schedule,
    ),
    renamed(
        "parallelism.pipeline_parallel_microbatch_size",
        1,
        "parallelism.pp_microbatch_size",
        "titanlite may take smaller ones, as many as the schedule needs.",
    ),
    Rule(
        {
            "parallelism.module_fqns_per_model_part": None,
            "parallelism.pipeline_parallel_split_points": [],
        },
        ("parallelism.pp_split",),
        "The first module of each stage except the first one. Split points are of torchtitan 0.1.",
        conversions.pipeline_split,
    ),
    absent(
        {
            "parallelism.pipeline_parallel_first_stage_less_layers": 1,
            "parallelism.pipeline_parallel_last_stage_less_layers": 1,
            "parallelism.pipeline_parallel_layers_per_stage": None,
        },
        "titanlite balances the parameters of the stages; parallelism.pp_split gives a certain split.",
    ),
    absent(
        {"parallelism.pipeline_parallel_expert_parallel_overlap": True},
        "Communication of experts does not overlap with the pipeline.",
    ),
    renamed("parallelism.context_parallel_degree", 1, "parallelism.cp"),
    Rule(
        {"parallelism.context_parallel_rotate_method": "allgather"},
        ("parallelism.context_parallel",),
        'allgather is "gather". titanlite\'s default "heads" has the flash kernel without a mask; both give the same '
        "numbers.",
        conversions.context_parallel,
        fills=False,
    ),
    absent(
        {"parallelism.context_parallel_load_balancer": "headtail"},
        'Both forms are balanced: "gather" gives each rank an early and a late part, "heads" entire rows.',
    ),
    Rule(
        {"parallelism.expert_parallel_degree": 1, "parallelism.expert_tensor_parallel_degree": 1},
        ("parallelism.ep",),
        "titanlite's ep ranks are among dp_shard x cp; with tp, each expert is sharded over tp.",
        conversions.experts,
    ),
    absent(
        {"parallelism.expert_parallel_comm_backend": "standard"},
        "Experts exchange rows by all-to-alls of the process group.",
    ),
    absent({"parallelism.enable_compiled_autograd": False}, "Blocks are compiled one by one: compile.enable."),
    # checkpoint
    same(
        "checkpoint.enable",
        False,
        "In both: save, and resume from the latest checkpoint in the folder. titanlite cannot read torchtitan's.",
    ),
    same("checkpoint.folder", "checkpoint"),
    same("checkpoint.interval", 500, "Also the last step is saved, in both."),
    Rule(
        {
            "checkpoint.initial_load_path": None,
            "checkpoint.initial_load_in_hf": False,
            "checkpoint.initial_load_model_only": True,
        },
        ("checkpoint.initial_load_path",),
        'A folder in the Hugging Face format is "hf:FOLDER", and only its weights are loaded, in both.',
        conversions.initial_load,
    ),
    absent(
        {"checkpoint.initial_load_in_hf_quantized": False},
        "Weights of the folder must not be quantized: write them in bfloat16 or float32 first, with transformers.",
    ),
    same(
        "checkpoint.last_save_model_only",
        True,
        "No run can resume from a last checkpoint with the model only; false is titanlite's default.",
        switch="checkpoint.enable",
    ),
    absent(
        {"checkpoint.last_save_in_hf": False, "checkpoint.export_dtype": "float32"},
        "After the run: `titanlite convert export DUMP_FOLDER --out DIR --dtype ...`.",
    ),
    same("checkpoint.async_mode", "disabled", "async_with_pinned_mem needs a GPU."),
    same("checkpoint.keep_latest_k", 10),
    Rule(
        {"checkpoint.load_step": -1},
        ("checkpoint.load_step",),
        "titanlite renames checkpoints of later steps.",
        conversions.load_step,
    ),
    absent(
        {"checkpoint.exclude_from_loading": []},
        'To start with the weights of another run: checkpoint.initial_load_path. checkpoint.accept_changes = ["data"] '
        "accepts other data.",
    ),
    absent({"checkpoint.enable_first_step_checkpoint": False}, "checkpoint.interval = 1 tests saves in a short run."),
    absent(
        {"checkpoint.create_seed_checkpoint": False},
        "Not needed: initial weights are the same on every mesh.",
    ),
    absent({"checkpoint.load_only": False}, "Use `titanlite evaluate`, or another job.dump_folder."),
    absent({"checkpoint.enable_ft_dataloader_checkpoints": True}, "Only with TorchFT: see fault_tolerance."),
    # activation_checkpoint
    Rule(
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
        (
            "activation_checkpoint.mode",
            "activation_checkpoint.selective_policy",
            "activation_checkpoint.selective_every",
        ),
        'An N recomputes every N-th block, in both. "op": torchtitan recomputes every second matrix product, titanlite '
        "none, which takes more memory. The numbers do not depend on it.",
        conversions.recomputation,
    ),
    absent(
        {"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
        "titanlite saves the results of all matrix products.",
    ),
    same("activation_checkpoint.memory_budget", 0.5),
    same("activation_checkpoint.early_stop", False, fills=False),
    same("activation_checkpoint.preserve_rng_state", True),
    same("activation_checkpoint.determinism_check", "default"),
    same("activation_checkpoint.debug", False),
    absent(
        {"activation_checkpoint.visualize_memory_budget_pareto": False},
        "`titanlite plan` prints the memory of a budget.",
    ),
    # compile
    same("compile.enable", False),
    Rule({"compile.components": ["model", "loss"]}, ("compile.components",), convert=conversions.components),
    same("compile.backend", "inductor"),
    # metrics
    same("metrics.log_freq", 10),
    Rule(
        {"metrics.enable_tensorboard": False, "metrics.enable_wandb": False},
        ("metrics.loggers",),
        "Project and tags of W&B: metrics.project and metrics.tags.",
        conversions.loggers,
    ),
    renamed("metrics.save_tb_folder", "tb", "metrics.folder"),
    absent({"metrics.save_for_all_ranks": False}, "Rank 0 logs the numbers of all ranks, and names slow ranks."),
    absent({"metrics.disable_color_printing": False}, "The log has no colors."),
    # profiling
    Rule(
        {"profiling.enable_profiling": False},
        ("profiling.enable_trace",),
        "profiling.ranks: all ranks in torchtitan, rank 0 in titanlite.",
        conversions.trace,
    ),
    Rule(
        {"profiling.enable_memory_snapshot": False},
        ("profiling.enable_memory_snapshot",),
        convert=conversions.memory_snapshot,
    ),
    Rule(
        {"profiling.profile_freq": 10},
        ("profiling.interval", "profiling.wait"),
        "A trace ends with each interval.",
        conversions.trace_interval,
        switch="profiling.enable_profiling",
    ),
    renamed("profiling.profiler_active", 1, "profiling.active", switch="profiling.enable_profiling"),
    renamed("profiling.profiler_warmup", 3, "profiling.warmup", switch="profiling.enable_profiling"),
    absent(
        {
            "profiling.save_traces_folder": "profile_traces",
            "profiling.save_memory_snapshot_folder": "memory_snapshot",
        },
        "The folders are traces and memory_snapshots, in the dump folder.",
    ),
    # validation
    same("validation.enable", False),
    Rule(
        {"validation.dataset": "c4_validation", "validation.dataset_path": None},
        ("validation.sources",),
        "Read from its start each time.",
        conversions.validation_sources,
        switch="validation.enable",
    ),
    renamed(
        "validation.freq",
        10,
        "validation.interval",
        "torchtitan also validates after step 1, titanlite after the last step.",
        switch="validation.enable",
    ),
    Rule(
        {"validation.steps": -1, "validation.local_batch_size": 8},
        ("validation.steps",),
        "Batches of training.global_batch_size sequences; in torchtitan, of validation.local_batch_size x data ranks.",
        conversions.validation_steps,
        switch="validation.enable",
    ),
    absent({"validation.seq_len": 2048}, "Validation has training.seq_len."),
    absent(
        {
            "validation.dataloader.num_workers": 0,
            "validation.dataloader.persistent_workers": False,
            "validation.dataloader.pin_memory": False,
            "validation.dataloader.prefetch_factor": None,
        },
        "Validation has the workers of [data].",
    ),
    # comm
    renamed("comm.init_timeout_seconds", 300, "comm.init_timeout_s"),
    renamed("comm.train_timeout_seconds", 100, "comm.train_timeout_s"),
    absent(
        {
            "comm.trace_buf_size": 20000,
            "comm.save_traces_folder": "comm_traces",
            "comm.save_traces_file_prefix": "rank_",
        },
        "Stacks and positions of all ranks are written to faults/ if one hangs; torch's variables for NCCL's flight "
        "recorder may be set as well.",
    ),
    absent({"comm.mode": "default"}, "Layouts without GPUs: `titanlite plan`, and `titanlite parity` on CPUs."),
    # debug
    Rule(
        {"debug.seed": None},
        ("debug.seed",),
        "Without a seed, torchtitan draws one; titanlite takes 0. data.seed is that of the data.",
        conversions.seed,
    ),
    same("debug.deterministic", False),
    same("debug.deterministic_warn_only", False),
    absent({"debug.moe_force_load_balance": False}, "Experts are always chosen by the router."),
    # sections without counterpart
    absent(
        {
            "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": False,
            "quantize.linear.float8.recipe_name": None,
            "quantize.linear.float8.filter_fqns": [],
            "quantize.linear.float8.emulate": False,
            "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "triton",
            "quantize.linear.mx.recipe_name": "mxfp8_cublas",
            "quantize.linear.mx.filter_fqns": ["output"],
            "quantize.grouped_mm.float8.fqns": [],
            "quantize.grouped_mm.mx.recipe_name": "mxfp8",
            "quantize.grouped_mm.mx.fqns": [],
        },
        "No float8 and no MX formats: the run computes in training.mixed_precision_param.",
    ),
    absent(
        {"memory_estimation.enable": False, "memory_estimation.disable_fake_mode": False},
        "`titanlite plan` estimates the memory of any layout.",
    ),
    absent(
        {
            "fault_tolerance.enable": False,
            "fault_tolerance.process_group": "gloo",
            "fault_tolerance.process_group_timeout_ms": 10000,
            "fault_tolerance.replica_id": 0,
            "fault_tolerance.group_size": 0,
            "fault_tolerance.min_replica_size": 1,
            "fault_tolerance.semi_sync_method": None,
        },
        "No TorchFT: an elastic run (NNODES=MIN:MAX) resumes without lost nodes, see docs/reliability.md.",
    ),
    absent(
        {"experimental.custom_import": "", "experimental.custom_args_module": ""},
        "Code for torchtitan: see docs/plugins.md.",
    ),
)
"""In the order of docs/from-torchtitan.md. No key is in two rules."""

OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "debug.seed": int,
    "lr_scheduler.total_steps": int,
    "lr_scheduler.decay_ratio": float,
    "model.tokenizer_path": str,
    "training.dataset_path": str,
    "validation.dataset_path": str,
    "checkpoint.initial_load_path": str,
    "parallelism.module_fqns_per_model_part": list,
    "parallelism.pipeline_parallel_split_points": (list, str),
    "activation_checkpoint.selective_ac_option": (str, int),
}
"""The type of a key whose default does not show it."""

RENAMED: dict[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.enable_compiled_autograd": "parallelism.enable_compiled_autograd",
    **{
        f"experimental.{key}": f"parallelism.{key}"
        for key in (
            *("enable_async_tensor_parallel", "context_parallel_degree", "context_parallel_rotate_method"),
            *("pipeline_parallel_degree", "pipeline_parallel_split_points", "pipeline_parallel_layers_per_stage"),
            *("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size"),
        )
    },
    "experimental.enable_compiled_autograd": "parallelism.enable_compiled_autograd",
    "experimental.custom_model_path": "experimental.custom_import",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "job.print_args": "job.print_config",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{
        f"float8.{key}": f"quantize.linear.float8.{key}"
        for key in (
            *("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name"),
            *("filter_fqns", "emulate"),
        )
    },
    **{f"mx.{key}": f"quantize.linear.mx.{key}" for key in ("recipe_name", "filter_fqns")},
}
"""A key of torchtitan 0.1, or of 0.2.0 and 0.2.1 -> that of 0.2.2 with the same values."""

GENERAL: tuple[tuple[str, str], ...] = (
    (
        "loss",
        "titanlite divides the sum of the loss by the number of valid tokens of the global batch, before backward, on "
        "every mesh. torchtitan 0.2.0 and 0.2.1 take the mean of each microbatch and rank, then the mean of the means: "
        "the same if all have equally many valid tokens, as packed text has. 0.2.2 divides as titanlite, but with a "
        "pipeline only the logged loss, so that gradients are larger by the number of valid tokens, and with replicas "
        "without shards gradients are smaller by their number. The update of AdamW hardly depends on that scale; "
        "training.max_norm and the logged gradient norm do.",
    ),
    (
        "initial weights",
        "Another draw, the same on every mesh. For equal weights, start both from a Hugging Face folder "
        '(checkpoint.initial_load_path = "hf:FOLDER").',
    ),
    (
        "tokens",
        "Another order, independent of the number of ranks. Neighboring sequences share one token, so that each token "
        "but the first is a target; in torchtitan, one of seq_len + 1 tokens never is.",
    ),
    (
        "learning rate",
        "torchtitan's decay is one step later: it would reach its minimum one step after the run, titanlite's reaches "
        "it in the last step.",
    ),
    (
        "bad steps",
        "A step whose gradient norm is NaN or infinite does not change the weights ([faults]); in torchtitan it does.",
    ),
    (
        "checkpoints",
        "torchtitan's are not read. Convert the model to a Hugging Face folder, and start from it.",
    ),
)
"""Differences that no key has: topic, text."""
