"""The fingerprint of a run's data: a few lines of JSON, saved with checkpoints and compared on resume."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.config import DataConfig
from titanlite.data.sources.base import Source
from titanlite.data.tokenizer import Tokenizer


def source_facts(source: Source, section: DataConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The facts of a source, with that of the chat template if it holds conversations. Raises UserError."""
    facts = source.facts(document_mask=section.masks_documents)
    if source.config.is_chat:
        assert tokenizer is not None, "sources of conversations need a tokenizer"
        facts["chat_template"] = f"sha256:{ChatEncoder(tokenizer).fingerprint}"
    return facts


def data_fingerprint(
    section: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer | None = None, window: int = 0
) -> dict[str, Any]:
    """The facts that decide which tokens a run sees and in which order, as JSON values. Compare two by
    `describe_difference`.

    `section` is resolved (no -1); `sources` are its sources. Of the tokenizer, only the chat template is included. The
    rest of it, data.num_streams, training.seq_len and training.global_batch_size also decide tokens and order.

    window: length of the windows of token files, if it is not that of the first stage; else 0.

    Included: sizes of the files, and the content of SAMPLED_BLOCKS blocks of each file. Not included: paths, names and
    times, so a corpus may be moved, copied and renamed if its files keep their order. **An edit is not detected if it
    keeps the size of a file of more than 64 KiB and lies between the sampled blocks.** The handling of bad rows is not
    included either: a run that stopped at a bad row can resume with on_bad_row = "skip".

    Called by one process: it reads the samples of all files. Raises UserError if a file cannot be read.
    """
    facts: dict[str, Any] = {"stream_version": section.stream_version, "shuffle": section.shuffle}
    if section.shuffle or len(section.sources) > 1:
        facts["seed"] = section.seed
    facts |= {"packing": section.packing, "document_mask": section.masks_documents}
    if any(source.holds == "text" and not source.config.is_chat for source in sources):
        facts |= {"max_piece_bytes": section.max_piece_bytes, "add_bos": section.adds_bos, "add_eos": section.add_eos}
    if window and any(source.holds == "tokens" for source in sources):
        facts["window"] = window
    return facts | {"sources": [source_facts(source, section, tokenizer) for source in sources]}


def describe_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per difference between two results of `data_fingerprint`; [] if the data is the same.

    saved: may come from a file of another version, with keys missing or added. Different names of sources are not a
    difference. Sources are compared by place, since the place decides position and order on resume.
    """
    lines = _changes({**saved, "sources": None}, {**now, "sources": None})
    before, after = saved.get("sources", []), now.get("sources", [])
    for n in range(max(len(before), len(after))):
        label = f"source {n} ({(after if n < len(after) else before)[n].get('name')})"
        if n >= len(before):
            lines.append(f"{label} is new: it begins at its start")
        elif n >= len(after):
            lines.append(f"{label} is missing")
        elif changes := _changes({**before[n], "name": None}, {**after[n], "name": None}):
            earlier, name = before[n].get("name"), after[n].get("name")
            place = [f"it takes the place and position of {earlier}"] if earlier != name else []
            lines.append(f"{label}: {'; '.join([*place, *changes])}")
    return lines


def num_sources(fingerprint: Mapping[str, Any]) -> int:
    """The number of sources of a result of `data_fingerprint`."""
    return len(fingerprint.get("sources", ()))


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = [*saved, *(key for key in now if key not in saved)]
    return [_change(key, saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)]


def _change(key: str, saved: Any, now: Any) -> str:
    if key == "content":
        return "content differs"
    if key == "chat_template" and saved and now:
        return "the chat template differs"
    if key == "documents" and saved and now:
        return "the starts of documents differ"
    if key in ("files", "bytes") and isinstance(saved, int) and isinstance(now, int):
        return f"{key} {saved:,} -> {now:,}"
    return f"{key} {json.dumps(saved)} -> {json.dumps(now)}"
