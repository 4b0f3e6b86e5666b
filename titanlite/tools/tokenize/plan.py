"""The plan of a tokenization: its parts, and what they are made from. It is written before the first part.

Sources are cut by their bytes, never by workers, so that the files are the same for any number of them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tokenizers
from typing_extensions import TypedDict

from titanlite import __version__
from titanlite.data.config import DataConfig
from titanlite.data.kinds import text_sources
from titanlite.data.order import STREAM_VERSION
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.stored import size_of
from titanlite.data.sources.tokens import FORMAT_VERSION, MANIFEST, UNFINISHED, ManifestTokenizer
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.tools.encoding import id_type
from titanlite.tools.tokenize.folder import OutputFolder

MIN_PART_BYTES, MAX_PARTS = 2**26, 10_000
"""Without --part-bytes, a part has at least so many bytes, and more if there were more parts."""


SHOWN_LARGE = 5

MADE_WITH = {"titanlite": __version__, "tokenizers": tokenizers.__version__}

FACTS_OF_FILES = ("weight", "epochs", "files", "bytes", "content", "commit")
"""Facts of a source that need its files, or do not decide the tokens."""


class PlannedFile(TypedDict):
    """digest: see sampled_digest."""

    path: str
    bytes: int
    digest: str


class Part(TypedDict):
    """The documents of one token file. files: [begin, end) in the files of the source; [0, 0]: the entire source.
    extent: the bytes [begin, end) of its only file; [] without limits. bytes: of the source."""

    source: int
    files: list[int]
    extent: list[int]
    bytes: int


class Settings(TypedDict):
    """What decides the tokens beside the sources. The manifest has these keys, too."""

    format: int
    dtype: str
    made_with: dict[str, str]
    tokenizer: ManifestTokenizer
    settings: dict[str, Any]


class Plan(Settings):
    """The schema of tokens.incomplete.json. files: of each source."""

    sources: list[dict[str, Any]]
    files: list[list[PlannedFile]]
    parts: list[Part]


@dataclass(frozen=True)
class Job:
    """What a worker needs. section: [data] with max_piece_bytes resolved."""

    out: OutputFolder
    section: DataConfig
    tokenizer: Tokenizer
    plan: Plan

    def name(self, part: int, suffix: str) -> str:
        """The name of a file of a part. Files are read in the order of their names."""
        width = max(5, len(str(len(self.plan["parts"]) - 1)))
        return f"tokens-{part:0{width}}{suffix}"

    def missing(self) -> list[int]:
        """The parts that are not written yet."""
        names = self.out.names()
        return [part for part in range(len(self.plan["parts"])) if self.name(part, ENTRY) not in names]


ENTRY = ".json"
"""Suffix of the entry of a part in the manifest, which is written last: the part is complete."""


def start_job(section: DataConfig, out: OutputFolder, tokenizer: Tokenizer, part_bytes: int | None) -> Job:
    """Write the plan and the tokenizer, or resume those of the same command. part_bytes: None: that of the plan to
    resume, else by the size of the sources.

    Raises UserError if they are of another command.
    """
    found = read_plan(out)
    sources = text_sources(section.sources)
    files = [_planned_files(source) for source in sources]
    if part_bytes is None and found is not None:
        part_bytes = found["settings"]["part_bytes"]
    part_bytes = part_bytes or max(MIN_PART_BYTES, sum(file["bytes"] for each in files for file in each) // MAX_PARTS)
    plan: Plan = {
        **_settings(section, tokenizer, part_bytes),
        "sources": [source.facts(document_mask=section.masks_documents) for source in sources],
        "files": files,
        "parts": [part for n, source in enumerate(sources) for part in parts_of(source, n, part_bytes)],
    }
    if found is None:
        out.create(UNFINISHED, (json.dumps(plan) + "\n").encode())
    else:
        _require_same(out, found, plan)
    out.add_tokenizer(tokenizer)
    return Job(out, section, tokenizer, plan)


def open_job(section: DataConfig, out: OutputFolder, tokenizer: Tokenizer) -> Job | None:
    """The job whose plan is in the folder; None if it is finished. Raises UserError if it is of another command; the
    files are compared when they are read."""
    plan = read_plan(out)
    if plan is None:
        if MANIFEST in out.names():
            return None
        raise UserError(f"{out} has no {UNFINISHED}: run the command with --engine slurm and without --part first")
    opened = text_sources(section.sources)
    sources = [{"name": source.name, "kind": source.kind, **source.settings()} for source in opened]
    planned = [{key: facts[key] for key in facts if key not in FACTS_OF_FILES} for facts in plan["sources"]]
    given = {**_settings(section, tokenizer, plan["settings"]["part_bytes"]), "sources": sources}
    _require_same(out, {**plan, "sources": planned}, given)
    return Job(out, section, tokenizer, plan)


def read_plan(out: OutputFolder) -> Plan | None:
    """The plan in the folder; None if there is none. Raises UserError."""
    try:
        plan: Plan = parse_json(out.read(UNFINISHED), Plan)
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise UserError(f"{out}/{UNFINISHED} {error}: remove the folder, or choose another --out") from None
    return plan


def _require_same(out: OutputFolder, plan: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError if facts of a command differ from those of the plan in the folder."""
    if different := [*_different(json.loads(json.dumps(plan)), json.loads(json.dumps(given)))]:
        raise UserError(
            f"{out} was started with another configuration (see {', '.join(different)} in {UNFINISHED}): resume with "
            "the same one, remove the folder, or choose another --out"
        )


def _different(plan: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The keys, such as settings.add_eos, whose values differ."""
    for key, value in given.items():
        if isinstance(value, dict):
            yield from (f"{key}.{each}" for each in _different(plan[key], value))
        elif plan.get(key) != value:
            yield key


def _settings(section: DataConfig, tokenizer: Tokenizer, part_bytes: int) -> Settings:
    return {
        "format": FORMAT_VERSION,
        "dtype": id_type(tokenizer.vocab_size).name,
        "made_with": MADE_WITH,
        "tokenizer": {
            "description": tokenizer.description,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "settings": {
            "add_bos": section.adds_bos,
            "add_eos": section.add_eos,
            "max_piece_bytes": section.max_piece_bytes,
            "stream_version": STREAM_VERSION if section.stream_version == -1 else section.stream_version,
            "part_bytes": part_bytes,
        },
    }


def _planned_files(source: TextSource) -> list[PlannedFile]:
    """The files of a source; [] if they are only known when all are read, as of a dataset of the hub."""
    if not source.reads_files_separately:
        return []
    digests = zip(source.files(), source.digests(), strict=True)
    return [{"path": str(file), "bytes": size_of(file), "digest": digest} for file, digest in digests]


def parts_of(source: TextSource, number: int, part_bytes: int) -> Iterator[Part]:
    """Cut a source: large files that can be divided into parts of about the same size, and small ones together."""
    if not source.reads_files_separately:
        yield {"source": number, "files": [0, 0], "extent": [], "bytes": 0}
        return
    first, waiting = 0, 0
    for place, file in enumerate(source.files()):
        size = size_of(file)
        if waiting and waiting + size > part_bytes:
            yield {"source": number, "files": [first, place], "extent": [], "bytes": waiting}
            first, waiting = place, 0
        if size > part_bytes and source.can_divide(file):
            if place > first:  # empty files
                yield {"source": number, "files": [first, place], "extent": [], "bytes": 0}
            count = -(-size // part_bytes)
            ends = [size * n // count for n in range(count + 1)]
            for begin, end in pairwise(ends):
                yield {"source": number, "files": [place, place + 1], "extent": [begin, end], "bytes": end - begin}
            first = place + 1
        else:
            waiting += size
    if first < len(source.files()):
        yield {"source": number, "files": [first, len(source.files())], "extent": [], "bytes": waiting}


def large_parts(plan: Plan) -> list[str]:
    """A line for each of the largest files that cannot be divided, which decide how long the last part takes."""
    usual = 4 * plan["settings"]["part_bytes"]
    large = [part for part in plan["parts"] if part["bytes"] > usual and not part["extent"]]
    large = sorted(large, key=lambda part: -part["bytes"])[:SHOWN_LARGE]
    return [
        f"{plan['files'][part['source']][part['files'][0]]['path']} is one part ({part['bytes'] / 2**30:,.1f} GiB) and "
        "cannot be divided; write it as several files, or as uncompressed lines, to tokenize it in parallel"
        for part in large
    ]
