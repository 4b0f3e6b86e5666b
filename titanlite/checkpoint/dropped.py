"""Keys that titanlite no longer has: runs that are stored with their defaults still resume."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from titanlite.runtime.errors import Problem


class Dropped(NamedTuple):
    """default: the value that every run has now; None: any. remedy: what to write in a file of one's own."""

    default: Any
    remedy: str


_WARMUP = 'write lr_schedule.warmup_steps = "2_000_000 tokens" or "5 %"'
_DECAY = 'write lr_schedule.{} = "2_000_000 tokens"'

DROPPED: Mapping[str, Dropped] = {
    "training.norm_type": Dropped("2", 'leave it out: the norm is always "2"'),
    "training.gc_freq": Dropped(50, "leave it out: Python's garbage is collected every 50 steps"),
    "parallelism.loss_parallel": Dropped(True, "leave it out: with tp, the logits of a cross-entropy stay sharded"),
    "activation_checkpoint.selective_every": Dropped(2, 'leave it out for every other block, or write mode = "full"'),
    "compile.components": Dropped(["model", "loss"], "leave it out: the blocks and the loss"),
    "optimizer.nesterov": Dropped(True, "leave it out: Muon always mixes gradient and momentum"),
    "optimizer.implementation": Dropped("auto", "leave it out: AdamW is fused, SGD foreach"),
    "optimizer.groups.beta1": Dropped(-1.0, "write optimizer.beta1 for all groups"),
    "optimizer.groups.momentum": Dropped(-1.0, "write optimizer.momentum for all groups"),
    "lr_schedule.warmup_tokens": Dropped(-1, _WARMUP),
    "lr_schedule.warmup_ratio": Dropped(-1.0, _WARMUP),
    "lr_schedule.decay_tokens": Dropped(-1, _DECAY.format("decay_steps")),
    "lr_schedule.final_decay_tokens": Dropped(-1, _DECAY.format("final_decay_steps")),
    "checkpoint.verify": Dropped("full", "leave it out: checkpoints are verified in full"),
    "checkpoint.last_save_model_only": Dropped(False, "leave it out; titanlite convert exports the weights only"),
    "faults.on_nonfinite": Dropped("skip", 'write faults.max_skipped_steps = 0 in place of "stop"'),
    "faults.record_steps": Dropped(100, "leave it out: the last 100 steps are recorded"),
    "metrics.folder": Dropped("tb", 'leave it out: the folder of TensorBoard is "tb" in job.dump_folder'),
    "samples.seed": Dropped(0, "leave it out: each step draws with the same seed"),
    "debug.deterministic_warn_only": Dropped(False, "leave it out: operations that are not deterministic fail"),
    "job.config_file": Dropped(None, "remove it: the file is the first argument of the command"),
}
"""Full key, without the index of a table in an array -> its default and a remedy."""


def remove_dropped(sections: dict[str, Any]) -> list[Problem]:
    """Remove dropped keys from the sections of a stored configuration; return a Problem for each with another value
    than its default, which this version cannot train with."""
    problems = []
    remedy = (
        "use that version, or start a new run from the weights: --checkpoint.initial_load_path FOLDER "
        "--job.dump_folder ANOTHER"
    )
    for full_key, (default, _) in DROPPED.items():
        section, *array, name = full_key.split(".")
        for row in _rows_of(sections.get(section, {}), array[0]) if array else [sections.get(section, {})]:
            value = row.pop(name, default)
            if value != default and default is not None:
                rule = f"{default!r}, now always: the run was started by a version of titanlite that had this key"
                problems.append(Problem(full_key, value, rule, remedy))
    return problems


def _rows_of(table: dict[str, Any], array: str) -> list[dict[str, Any]]:
    """The tables of an array, which are replaced by copies."""
    if isinstance(table.get(array), list):
        table[array] = [dict(row) if isinstance(row, dict) else row for row in table[array]]
        return [row for row in table[array] if isinstance(row, dict)]
    return []
