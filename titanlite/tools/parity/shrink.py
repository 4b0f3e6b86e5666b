"""The configuration that is compared: disables settings that would hide a difference; shrinks all sizes on request."""

import sys
import tempfile
from dataclasses import asdict, replace

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.check import resolve_config
from titanlite.config.conventions import with_conventions
from titanlite.config.lengths import UNSET
from titanlite.config.schema import JobConfig, JobSection
from titanlite.config.stages import SIZES
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.config import PIECE_BYTES_PER_POSITION
from titanlite.metrics.config import MetricsConfig
from titanlite.models.init import BLOCK_NUMEL
from titanlite.models.shrink import shrink_model, size_alike
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.schedule import ScheduleConfig
from titanlite.tools.parity.layouts import ONE_PROCESS, config_of

SHRUNK_SEQ_LEN = 32


def comparable_config(config: JobConfig, ranks: int) -> JobConfig:
    """The configuration without the parts that the comparison does not use: dump folder, checkpoints and metrics. Of a
    model folder that the run starts from, it keeps the tokenizer.

    A local_batch_size of -1 becomes 1, since layouts are compared, not devices. A global_batch_size of -1 becomes
    local_batch_size x `ranks`, so that all layouts train on the same batch. ranks: a multiple of the number of ranks of
    each layout.
    """
    config = with_conventions(config)
    training = config.training
    if training.local_batch_size == -1:
        training = replace(training, local_batch_size=1)
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=training.local_batch_size * ranks)
    return replace(
        config,
        job=JobSection(dump_folder=tempfile.gettempdir()),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
        training=training,
    )


def gradient_config(config: JobConfig) -> JobConfig:
    """The configuration of the steps whose gradients are compared: not rounded or clipped, and with plain SGD.

    Gradients are compared after backward, and their norm is that which clipping would use.
    """
    return replace(
        config,
        training=replace(config.training, bit_equal=False, max_norm=0.0),
        optimizer=OptimizerConfig(name="SGD", lr=config.optimizer.lr, weight_decay=0.0),
        lr_schedule=ScheduleConfig(warmup_steps=0, decay="none"),
    )


def resolved_config(config: JobConfig) -> JobConfig:
    """The configuration with every -1 and "auto" resolved for one process on the CPU, the same for all layouts. Updates
    are compared in float64, and so is the orthogonalization of Muon."""
    resolved = resolve_config(config_of(config, ONE_PROCESS), world_size=1, device_type="cpu")
    return replace(resolved, optimizer=replace(resolved.optimizer, newton_schulz_dtype="auto"))


def shrink_config(config: JobConfig, ranks: int) -> JobConfig:
    """A small configuration whose sizes are divisible by the same mesh degrees, up to `ranks`, as those of `config`.

    The vocabulary shrinks to the tokenizer's if that is smaller; token files may contain any id, so their vocabulary
    stays. The vocabulary is enlarged if necessary, until the embedding has more elements than one block of initial
    weights. Sizes of training stages become those of the first one, or twice as large if they are larger than those.
    The text is cut into the same pieces, so an existing index is reused.
    """
    model = config.hyper_parameters
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=model.vocab_size)
    small = shrink_model(model, ranks)
    vocab_size = min(model.vocab_size, tokenizer.vocab_size) if tokenizer else model.vocab_size
    if vocab_size * small.dim <= BLOCK_NUMEL:
        vocab_size = size_alike(model.vocab_size, BLOCK_NUMEL // small.dim + 1, ranks, sys.maxsize)
    small = replace(small, vocab_size=vocab_size)
    training, data = config.training, config.data
    if data.max_piece_bytes == -1:
        data = replace(data, max_piece_bytes=PIECE_BYTES_PER_POSITION * training.seq_len)
    # One batch must fill a pipeline of all ranks twice, the requirement of the most demanding schedule.
    local = 2 * ranks if config.parallelism.gradient_sync == "every" else 1
    before = training
    training = replace(
        training,
        seq_len=size_alike(training.seq_len, SHRUNK_SEQ_LEN, 2 * ranks),  # "gather" halves the part of a rank
        local_batch_size=local,
        global_batch_size=max(2, local) * ranks,
    )
    rows = []
    for row in before.stages:
        given = [key for key in SIZES if getattr(row, key) != UNSET]
        factors = {key: 1 + (getattr(row, key) > getattr(before, key)) for key in given}
        rows.append(replace(row, **{key: factor * getattr(training, key) for key, factor in factors.items()}))
    training = replace(training, stages=tuple(rows))
    return replace(
        config,
        model=replace(config.model, overrides=asdict(small)),
        training=training,
        data=data,
        parallelism=replace(config.parallelism, pp_microbatch_size=1, pp_split=()),
    )


def at_boundaries(config: JobConfig, steps: int) -> JobConfig:
    """The resolved configuration whose training stages have `steps` steps each."""
    rows = config.training.stages
    begun = tuple(replace(row, from_step=steps * number + 1) for number, row in enumerate(rows, 1))
    return replace(config, training=replace(config.training, stages=begun))


def describe_shrinking(before: JobConfig, after: JobConfig) -> str:
    """The changed sizes, in one line."""
    changed = []
    models = [config.hyper_parameters for config in (before, after)]
    for section, (old, new) in {"model": models, "training": [before.training, after.training]}.items():
        values = vars(new)
        changed += [f"{section}.{key} {was} -> {values[key]}" for key, was in vars(old).items() if was != values[key]]
    return ", ".join(changed) or "nothing: all sizes are already this small"
