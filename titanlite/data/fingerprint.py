"""What data a run was trained on, in a few lines of JSON: to be saved, and compared when the run goes on."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from titanlite.data.blocks import MAX_BLOCK_BYTES, MAX_BLOCK_ROWS
from titanlite.data.cache import built_once, cache_folder, content_key, file_facts
from titanlite.data.config import DataConfig
from titanlite.data.hub import hub_files, source_split
from titanlite.data.permutation import STREAM_VERSION
from titanlite.data.sources import SourceConfig, find_files, source_name
from titanlite.data.token_files import documents_file, manifests_of
from titanlite.runtime.errors import UserError

DIGEST_VERSION = 1
"""Version of the digest of a source's content. A change of the digest of any corpus is a new version."""

BLOCK_BYTES = 8 * 2**10
SAMPLED_BLOCKS = 8
"""So many blocks of a large file are read, evenly from its first bytes to its last; a file that is not larger than they
are together is read as a whole."""

READERS = 16
"""Files that are read at once: what takes time is to wait for their file system."""


def data_fingerprint(section: DataConfig) -> dict[str, Any]:
    """What decides which tokens a run sees and in which order; JSON values, a few lines for each source.

    To be compared by `describe_difference`. `section` is resolved (no -1). Beside it, tokens depend on the tokenizer,
    data.num_streams, training.seq_len and training.global_batch_size, which are not part of this.

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
    if any(source.kind != "tokens" for source in section.sources):
        facts |= {
            "max_piece_bytes": section.max_piece_bytes,
            "add_bos": section.add_bos,
            "add_eos": section.add_eos,
        }
    mask = section.document_mask
    return facts | {"sources": [_source_facts(source, document_mask=mask) for source in section.sources]}


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


def _source_facts(source: SourceConfig, *, document_mask: bool) -> dict[str, Any]:
    """python-stdlib: the files of both splits, since which of them belong to one depends on all.

    document_mask: whether it matters where documents start in token files, which stands in files beside them.

    A dataset on the hub is what its commit says it is; a folder in its layout is known by its files, as other kinds.
    """
    settings_of: dict[str, dict[str, Any]] = {
        "text": {"document": source.document or "file"},
        "jsonl": {"field": source.field or "text"},
        "parquet": {"field": source.field or "text"},
        "hf": {
            "subset": source.subset or "default",
            "split": source_split(source),
            "field": source.field or "text",
            "blocks": [MAX_BLOCK_ROWS, MAX_BLOCK_BYTES] if source.streaming else None,
        },
        "tokens": {"dtype": source.dtype},
        "python-stdlib": {"split": source.split or "train"},
    }
    facts = {
        "name": source_name(source),
        "kind": source.kind,
        **settings_of[source.kind],
        "weight": source.weight,
        "epochs": source.epochs,
    }
    if source.kind == "hf":
        found = hub_files(source)
        if found.commit:
            return facts | {"commit": found.commit, "files": len(found.files)}
        files = [Path(file) for file in found.files]
    else:
        files = find_files(source)
    if source.kind == "tokens":
        facts |= _tokenizer_facts(files)
        if document_mask:
            facts["documents"] = _content_digest(source, [documents_file(file) for file in files])
    return facts | {
        "files": len(files),
        "bytes": sum(size for _, size, _ in file_facts(files)),
        "content": _content_digest(source, files),
    }


def _tokenizer_facts(files: list[Path]) -> dict[str, Any]:
    """What the folders of token files say about their tokenizer; nothing where they say nothing."""
    made_by = sorted({manifest["tokenizer"]["fingerprint"] for manifest in manifests_of(files).values()})
    return {"tokenizer": ", ".join(made_by)} if made_by else {}


def _content_digest(source: SourceConfig, files: list[Path]) -> str:
    """Of the files in their order; from the cache where none of them has changed."""
    folder = cache_folder() / "fingerprint" / content_key(["fingerprint", DIGEST_VERSION, file_facts(files)])

    def build(into: Path) -> None:
        with ThreadPoolExecutor(READERS) as pool:
            digest = xxhash.xxh3_128(b"".join(pool.map(_file_digest, files)))
        (into / "digest.json").write_text(json.dumps(f"xxh3-128:{digest.hexdigest()}"))

    built = built_once(folder, f"the fingerprint of {source_name(source)}", build)
    text: str = json.loads((built / "digest.json").read_text())
    return text


def _file_digest(file: Path) -> bytes:
    """16 bytes, of the file's size and of what `SAMPLED_BLOCKS` says is read of it."""
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, 2)
            digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
            if size <= SAMPLED_BLOCKS * BLOCK_BYTES:
                begins, length = [0], size
            else:
                last = size - BLOCK_BYTES
                begins, length = [last * n // (SAMPLED_BLOCKS - 1) for n in range(SAMPLED_BLOCKS)], BLOCK_BYTES
            for begin in begins:
                opened.seek(begin)
                digest.update(opened.read(length))
            return digest.digest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
