"""What a resumed run has to agree with: refused with the difference, unless that is accepted in so many words."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from titanlite.checkpoint.config import Changeable
from titanlite.data.fingerprint import describe_difference
from titanlite.runtime.errors import UserError

# Facts that decide what the tensors of a checkpoint mean, with what to do about a change.
_REMEDIES = {
    "model": "resume with the model of the checkpoint",
    "seq_len": "resume with the checkpoint's training.seq_len",
    "dtype": "resume with the checkpoint's training.dtype",
    "optimizer": "resume with the checkpoint's optimizer.name",
    "num_streams": "resume with the checkpoint's data.num_streams: leave the key out",
    "streams_version": "resume with a titanlite of that version",
    "imported_from": "these are an import's weights alone, which no run goes on from: as the last line says",
}
_FRESH = "start a new run from these weights: --checkpoint.initial_load_path FOLDER --job.dump_folder ANOTHER"

# What may differ without a word: the layout, what is logged and where, when a run stops, and what is among the facts.
_SILENT = (
    *("job.", "parallelism.", "activation_checkpoint.", "compile.", "comm.", "metrics.", "checkpoint."),
    *("model.", "tokenizer."),
)
_SILENT_KEYS = {
    *("training.steps", "training.local_batch_size", "training.gc_freq", "data.max_bad_rows"),
    *("training.seq_len", "training.dtype", "optimizer.name", "data.num_streams", "data.sources", "data.shuffle"),
    *("data.seed", "data.max_piece_bytes", "data.packing", "data.document_mask", "data.add_bos", "data.add_eos"),
    *("data.num_workers", "data.ledger", "validation.enable", "validation.interval"),
}


def check_facts(
    saved: Mapping[str, Any], now: Mapping[str, Any], accepted: Collection[Changeable], where: str
) -> list[str]:
    """Lines about what was accepted. Raises UserError with every difference that was not.

    saved, now: facts by name; a fact is a JSON value, compared part by part. where: the checkpoint.
    """
    lines, refused = [], []
    for name in sorted({*saved, *now}):
        if name == "data":
            found = [f"data: {line}" for line in describe_difference(saved.get(name, {}), now.get(name, {}))]
        else:
            found = list(differences(saved.get(name), now.get(name), name))
        if not found:
            continue
        if name in accepted:
            lines += [f"accepted change since the checkpoint: {line}" for line in found]
        else:
            accept = f"or go on all the same: --checkpoint.accept_changes '[\"{name}\"]'"
            remedy = _REMEDIES.get(name, f"resume with the {name} of the checkpoint, {accept}")
            refused.append("\n".join([*(f"  {line}" for line in found), f"    remedy: {remedy}"]))
    if refused:
        raise UserError(
            f"the run cannot go on from {where}: it was made with other settings\n"
            + "\n".join(refused)
            + f"\n  or, whatever the difference: {_FRESH}"
        )
    return lines


def differences(saved: Any, now: Any, name: str) -> Iterator[str]:
    """One line per part that differs: "<name>: <saved> in the checkpoint, <now> now"."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in [*saved, *(key for key in now if key not in saved)]:
            yield from differences(saved.get(key), now.get(key), f"{name}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(now, list | tuple) and len(saved) == len(now):
        for number, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from differences(one, other, f"{name}.{number}")
    elif saved != now:
        yield f"{name}: {_shown(saved)} in the checkpoint, {_shown(now)} now"


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per setting that bears on the numbers of the steps to come and is another one than in the checkpoint.

    saved, now: resolved configurations, section by section.
    """
    lines: list[str] = []
    for section, values in now.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if not name.startswith(_SILENT) and name not in _SILENT_KEYS:
                lines += differences(saved.get(section, {}).get(key), value, name)
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
