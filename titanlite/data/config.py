"""The [data] section: what is trained on, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titanlite.data.hub import check_hub
from titanlite.data.sources import SourceConfig, check_source, size_unit
from titanlite.data.windows import check_tokens
from titanlite.runtime.errors import Problem, require

MIN_PIECE_BYTES = 16
PIECE_BYTES_PER_POSITION = 64


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and in which order."""

    num_streams: int = -1
    """Canonical streams S: the order of the tokens follows from it, whatever the mesh. -1: one per row of the
    global batch, resolved at the first start and kept by its checkpoints."""
    shuffle: bool = True
    """Whether pieces are permuted, anew in each epoch."""
    seed: int = 0
    """Seed of the permutation, and of the choice among sources."""
    max_piece_bytes: int = -1
    """Longer documents are cut into pieces of at most this size, at line ends where there are any.
    -1: 64 x training.seq_len."""
    packing: Literal["concatenate", "none"] = "concatenate"
    """concatenate: documents one after the other fill each sequence. none: each document starts a sequence, and the
    rest of its last one is padded and masked."""
    document_mask: bool = False
    """Whether attention stays inside a document and positions restart at each."""
    add_bos: bool = False
    """Whether each document starts with the tokenizer's BOS token."""
    add_eos: bool = True
    """Whether each document ends with the tokenizer's EOS token, where it has one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: error stops at the step that consumes it, skip counts it and goes on."""
    max_bad_rows: int = 100
    """skip: the run stops once more rows than this were bad."""
    num_workers: int = 0
    """Processes of each rank that tokenize and pack, beside the one that trains; 0: a thread of that one."""
    ledger: bool = False
    """Whether <dump_folder>/ledger says of each sequence where it came from."""
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """The corpora, trained on together: [[data.sources]] tables."""


def check_data(
    section: DataConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    data_degree: int,
    vocab_size: int,
    looks_at_files: bool = True,
) -> list[Problem]:
    """Problems of the [data] section. Facts that are not known (yet) are 0 or -1: what needs them is not checked.

    looks_at_files: also those of the sources' files, which have to be there.
    """
    streams = section.num_streams
    problems = [
        *require(streams == -1 or streams >= 1, "data.num_streams", streams, "-1 or at least 1", "leave it out"),
        *require(
            section.max_piece_bytes == -1 or section.max_piece_bytes >= MIN_PIECE_BYTES,
            "data.max_piece_bytes",
            section.max_piece_bytes,
            f"-1 or at least {MIN_PIECE_BYTES}",
            "leave it out" + (f": -1 means {PIECE_BYTES_PER_POSITION * seq_len}" if seq_len > 0 else ""),
        ),
        *require(section.max_bad_rows >= 0, "data.max_bad_rows", section.max_bad_rows, "at least 0", "write 0 or more"),
        *require(section.num_workers >= 0, "data.num_workers", section.num_workers, "at least 0", "write 0 or more"),
        *require(bool(section.sources), "data.sources", [], "at least one source", "add a [[data.sources]] table"),
        *require(
            0 <= section.seed < 2**63,
            "data.seed",
            section.seed,
            "from 0 to 2^63 - 1",
            "write a number from 0",
        ),
    ]
    if streams >= 1 and data_degree > 0:
        problems += require(
            streams % data_degree == 0,
            "data.num_streams",
            streams,
            f"divisible by dp_replicate x dp_shard = {data_degree}, so that a rank reads only streams of its own",
            f"write {-(-streams // data_degree) * data_degree}, or leave it out"
            + (f": it is then training.global_batch_size = {global_batch_size}" if global_batch_size > 0 else ""),
        )
    for n, source in enumerate(section.sources):
        problems += check_with_settings(
            source, f"data.sources.{n}", section, vocab_size=vocab_size, looks_at_files=looks_at_files
        )
    return problems + _check_weights(section.sources)


def check_with_settings(
    source: SourceConfig, key: str, section: DataConfig, *, vocab_size: int, looks_at_files: bool
) -> list[Problem]:
    """Problems of the source at `key`, which is read with the settings of `section`."""
    found = check_source(source, key, looks_at_files=looks_at_files)
    if looks_at_files and source.kind == "tokens" and not found and vocab_size > 0:
        found = check_tokens(source, key, vocab_size, needs_documents=section.document_mask)
    if looks_at_files and source.kind == "hf" and not found:
        found = check_hub(source, key)
    return found + require(
        source.kind != "tokens" or section.packing == "concatenate",
        "data.packing",
        section.packing,
        f"not with token files ({key}), whose sequences are windows of them",
        'write packing = "concatenate", or use the text itself',
    )


def _check_weights(sources: Sequence[SourceConfig]) -> list[Problem]:
    """Weights are given for all sources or for none; for none, their sizes have to compare."""
    if len(sources) < 2:
        return []
    without = [n for n, source in enumerate(sources) if source.weight == -1]
    if without and len(without) < len(sources):
        n = without[0]
        rule = "given for every source or for none"
        return [Problem(f"data.sources.{n}.weight", -1, rule, "write its share, beside those of the others")]
    units = [size_unit(source) for source in sources]
    if without and (units[0] == "" or len(set(units)) > 1):
        rule = "required where sources are not all text, or all tokens, on disk: their sizes do not compare"
        return [Problem("data.sources.0.weight", -1, rule, "write a weight for each: its share of the sequences")]
    return []
