"""The manifest of a finished tokenization, written when all parts are: the folder is complete."""

import json
from typing import Any

from titanlite.data.config import DataConfig
from titanlite.data.sources.tokens import MANIFEST, UNFINISHED, Shard
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.text import counted
from titanlite.tools.tokenize.plan import ENTRY, Job


def finish(job: Job) -> dict[str, Any]:
    """Write the manifest of the parts, all of which are written, and delete their entries. Raises UserError.

    Several processes may do so at the same time.
    """
    names = [job.name(part, ENTRY) for part in range(len(job.plan["parts"]))]
    try:
        contents = job.out.read_all(names)
    except FileNotFoundError:  # another process was faster
        found: dict[str, Any] = _parsed(job, MANIFEST, job.out.read(MANIFEST), dict[str, Any])
        job.out.delete(names)
        return found
    entries: list[Shard] = [_parsed(job, *each, Shard) for each in zip(names, contents, strict=True)]
    shards = [entry for entry in entries if entry["tokens"]]
    if not shards:
        raise UserError(f"there is nothing to tokenize: no document of {counted(len(entries), 'part')} has a token")
    check_bad_rows(job.section, sum(entry["bad_rows"] for entry in entries))
    manifest: dict[str, Any] = {key: value for key, value in job.plan.items() if key not in ("files", "parts")}
    manifest |= {
        "tokens": sum(entry["tokens"] for entry in entries),
        "documents": sum(entry["documents"] for entry in entries),
        "bad_rows": sum(entry["bad_rows"] for entry in entries),
        "shards": shards,
    }
    job.out.write(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    job.out.delete([UNFINISHED])  # before the entries: they are those of a plan
    job.out.delete(names)
    return manifest


def _parsed(job: Job, name: str, content: bytes, schema: Any) -> Any:
    """The content of a file in the folder. Raises UserError."""
    try:
        return parse_json(content, schema)
    except JsonError as error:
        raise UserError(f"{job.out}/{name} {error}: remove it, and run the same command again") from None


def check_bad_rows(section: DataConfig, bad_rows: int) -> None:
    """Raise UserError if so many rows of all parts may not be bad."""
    limit = section.max_bad_rows if section.on_bad_row == "skip" else 0
    if bad_rows > limit:
        raise UserError(
            f"{bad_rows} bad rows so far, more than data.max_bad_rows = {limit}: fix the rows that are named above and "
            "choose another --out, or allow more and run the same command again"
        )
