"""Settings that reduce an item of the planned memory."""

from collections.abc import Mapping

from titanlite.config.schema import JobConfig
from titanlite.runtime.memory import GIB


def remedies(config: JobConfig, item: str) -> list[str]:
    """Settings that reduce `item`, a name of Memory.items; those that change nothing for this configuration are
    left out."""
    section, training = config.parallelism, config.training
    ranks = "a larger parallelism.dp_shard, tp or pp (more ranks share the model)"
    if item == "activations":
        options = {
            "a smaller activation_checkpoint.memory_budget": config.activation_checkpoint.mode == "memory_budget",
            'activation_checkpoint.mode = "full"': config.activation_checkpoint.mode != "full",
            "training.local_batch_size = 1": section.pp == 1 and training.local_batch_size > 1,
            "parallelism.pp_microbatch_size = 1": section.pp > 1 and section.pp_microbatch_size > 1,
            "a smaller loss.chunk_tokens": not config.loss.is_cross_entropy and config.loss.chunk_tokens != 1,
            'parallelism.pp_schedule = "1F1B" (fewer microbatches in flight)': section.pp > 1
            and section.pp_schedule != "1F1B",
            "a larger parallelism.tp": True,
        }
        return [option for option, helps in options.items() if helps]
    if item == "data parallel":
        policy = ['parallelism.gradient_sync = "hybrid" or "every"']
        return [
            *(policy if section.pp == 1 and section.gradient_sync == "last" else ()),
            "a larger parallelism.tp or pp",
        ]
    if item == "update":
        optimizer = config.optimizer
        if "Muon" not in (optimizer.name, *(group.optimizer for group in optimizer.groups)):
            return ['optimizer.name = "AdamW", which needs no copies', ranks]
        options = {
            'optimizer.newton_schulz_dtype = "bfloat16" (less precise updates)': optimizer.newton_schulz_dtype
            != "bfloat16",
            'optimizer.name = "AdamW"': True,
        }
        return [option for option, helps in options.items() if helps]
    if item == "pipeline":
        return ['parallelism.gradient_sync = "every" (fewer microbatches at once)', "a larger parallelism.tp"]
    options = {
        ranks: True,
        "parallelism.dp_replicate = 1 (shards over these ranks, too)": section.dp_replicate > 1,
        'training.dtype = "bfloat16" (less precise updates)': training.dtype != "bfloat16",
        "a smaller model (model.flavor)": True,
    }
    return [option for option, helps in options.items() if helps]


def describe_items(items: Mapping[str, int]) -> str:
    """The three largest items, in GiB. items: bytes by name."""
    return ", ".join(f"{item} {items[item] / GIB:.1f} GiB" for item in _largest(items))


def first_remedies(config: JobConfig, items: Mapping[str, int]) -> list[str]:
    """Three settings that reduce the largest items. items: bytes by name."""
    found = [remedy for item in _largest(items) for remedy in remedies(config, item)]
    return list(dict.fromkeys([*found, "a shorter training.seq_len"]))[:3]


def _largest(items: Mapping[str, int]) -> list[str]:
    return sorted(items, key=lambda item: -items[item])[:3]
