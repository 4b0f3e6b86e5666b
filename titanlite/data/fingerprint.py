"""What data a run was trained on, in a few lines of JSON: to be saved, and compared when the run goes on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.data.config import DataConfig
from titanlite.data.order import STREAM_VERSION
from titanlite.data.sources.base import Source


def data_fingerprint(section: DataConfig, sources: Sequence[Source]) -> dict[str, Any]:
    """What decides which tokens a run sees and in which order; JSON values, a few lines for each source.

    To be compared by `describe_difference`. `section` is resolved (no -1), `sources` are its own. Beside them, tokens
    depend on the tokenizer, data.num_streams, training.seq_len and training.global_batch_size, which are not part of
    this.

    Where the files lie, their names and times do not matter: a corpus may be moved, copied and renamed, as long as its
    files keep their order. Their sizes and the content of SAMPLED_BLOCKS blocks of each do. **An edit that keeps the
    size of a file of more than 64 KiB and lies between these blocks is not seen.** Nor is what happens to a bad row
    part of it: a run that was stopped by one may go on with on_bad_row = "skip".

    One process calls this; digests are kept in the cache folder until a file's size or time changes. Raises UserError
    where a file cannot be read.
    """
    facts: dict[str, Any] = {"stream_version": STREAM_VERSION, "shuffle": section.shuffle}
    if section.shuffle or len(section.sources) > 1:
        facts["seed"] = section.seed
    facts |= {"packing": section.packing, "document_mask": section.document_mask}
    if any(source.holds == "text" for source in sources):
        facts |= {
            "max_piece_bytes": section.max_piece_bytes,
            "add_bos": section.add_bos,
            "add_eos": section.add_eos,
        }
    return facts | {"sources": [source.facts(document_mask=section.document_mask) for source in sources]}


def describe_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each thing in which two results of `data_fingerprint` differ; [] where the data is the same.

    saved: may come from a file, with keys missing or added. Names of sources are in the lines, but may differ.
    """
    lines = _changes({**saved, "sources": None}, {**now, "sources": None})
    before, after = saved.get("sources", []), now.get("sources", [])
    for n in range(max(len(before), len(after))):
        what = f"source {n} ({(after if n < len(after) else before)[n].get('name')})"
        if n >= len(before):
            lines.append(f"{what} is new")
        elif n >= len(after):
            lines.append(f"{what} is missing")
        elif changes := _changes({**before[n], "name": None}, {**after[n], "name": None}):
            lines.append(f"{what}: {'; '.join(changes)}")
    return lines


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = [*saved, *(key for key in now if key not in saved)]
    return [_change(key, saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)]


def _change(key: str, saved: Any, now: Any) -> str:
    if key == "content":
        return "content differs"
    if key == "documents" and saved and now:
        return "the starts of documents differ"
    if key in ("files", "bytes") and isinstance(saved, int) and isinstance(now, int):
        return f"{key} {saved:,} -> {now:,}"
    return f"{key} {json.dumps(saved)} -> {json.dumps(now)}"
