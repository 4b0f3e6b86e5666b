"""Command: show the data of a configuration, and the sequences that the model is trained on."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import get_args

import numpy as np

from titanlite.config.check import resolve_config
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.config import DataConfig
from titanlite.data.corpus import open_index
from titanlite.data.kinds import open_source
from titanlite.data.order import Mixture, shuffled
from titanlite.data.packing import Packing, num_sequences, packed_lengths
from titanlite.data.preparation import Assignment, Preparation
from titanlite.data.sources.base import StreamedSource, TextSource
from titanlite.data.sources.formats import format_of, open_tokens
from titanlite.data.sources.pieces import BAD_FILE, STARTS_DOCUMENT, BadRowError, Piece, TokenPiece
from titanlite.data.sources.stored import size_of
from titanlite.data.sources.tokens import Tokens, manifests_of
from titanlite.data.streams import TooLong, piece_lengths
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.mesh import AXES
from titanlite.runtime.progress import tqdm
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import ConfigFile, Count, print_lines, print_text, read_options_and_overrides, run_command
from titanlite.tools.documents import config_of_data
from titanlite.tools.encoding import TextEncoder
from titanlite.tools.sequences import sequences_as_text

SAMPLED_DOCUMENTS = 1000
"""Documents of each source that are read for the statistics, drawn by data.seed."""

STEPS = 100
"""Steps, of the first stage, whose sequences are counted for the realized shares."""

BATCH_DOCUMENTS = 64
SHOWN_BAD_ROWS = 3
PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Options:
    """Show the data that a configuration trains on: sizes, shares, bad rows, and the first sequences as text.

    Override a key of CONFIG by --section.key VALUE, as for training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    sequences: Count = setting(3, "write a number in this range, 0 to show none", least=0, most=2**63 - 1)
    """number of the run's first sequences to show"""
    all: bool = False
    """read all documents for the statistics, not a sample of each source"""


def main(argv: Sequence[str]) -> None:
    """Print statistics of each source, and the first sequences as text. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "inspect")
    config = config_of_data(options, overrides, problems, needs_tokenizer=True, reads_tokens=True)
    # Replace each -1 for the configured layout; dp_shard = -1 becomes 1, since the number of ranks is unknown.
    world_size = math.prod(max(1, getattr(config.parallelism, axis)) for axis in AXES)
    config = resolve_config(config, world_size=world_size, device_type="cpu")
    vocab_size = config.hyper_parameters.vocab_size
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=vocab_size)
    print_lines(f"tokenizer: {tokenizer.description if tokenizer else 'none, the sources hold tokens'}")
    describe_sources(config, tokenizer, vocab_size, reads_all=options.all)
    for text in sequences_as_text(config, tokenizer, vocab_size, options.sequences):
        print_text(text)


@dataclass
class Statistics:
    """Statistics of all documents, or of a sample.

    lengths: tokens of each non-empty document. size: their bytes by the index, approximately. packed: of each document,
    the tokens of its pieces; of conversations those that a sequence has, 0 if it is left out. pieces: pieces read.
    bad_rows: bad ones among them; faults: the first errors. Of conversations: trained: tokens that are trained on;
    too_long: conversations of more than seq_len + 1 tokens.
    """

    lengths: list[int] = field(default_factory=list)
    size: int = 0
    packed: list[list[int]] = field(default_factory=list)
    pieces: int = 0
    bad_rows: int = 0
    faults: list[str] = field(default_factory=list)
    trained: int = 0
    too_long: int = 0


def describe_sources(config: JobConfig, tokenizer: Tokenizer | None, vocab_size: int, *, reads_all: bool) -> None:
    """Print the statistics of each source."""
    data, training = config.data, config.training
    sources = [open_source(source) for source in data.sources]
    stages = batch_stages(config)
    mixture, *later = Preparation(Assignment(data, None, vocab_size, stages), sources, tokenizer, streams=()).mixtures
    steps = min(STEPS, stages[1].from_step - 1) if later else STEPS
    realized = realized_shares(mixture, data.num_streams, steps * training.global_batch_size)
    for n, source in enumerate(sources):
        print_lines("", f"source {n}, {source.name}")
        sequences = None
        if isinstance(source, Tokens):
            sequences = describe_token_files(source, training.seq_len)
        elif isinstance(source, StreamedSource):
            print_lines("  size          unknown: the source is streamed")
        else:
            assert tokenizer is not None, "sources of text have a tokenizer"
            assert isinstance(source, TextSource)
            sequences = describe_text(source, data, tokenizer, training.seq_len, reads_all=reads_all)
        if len(data.sources) > 1:
            weight = "by size" if source.config.weight == -1 else f"weight {source.config.weight:g}"
            share = f"{mixture.shares[n]:.2%} of the sequences ({weight})"
            of_stages = "".join(f", {each.shares[n]:.2%} in stage {number}" for number, each in enumerate(later, 2))
            print_lines(
                f"  share         {share}, {realized[n]:.2%} of those of the first {counted(steps, 'step')}{of_stages}"
            )
        if sequences is not None and mixture.shares[n]:
            in_steps = sequences / (training.global_batch_size * mixture.shares[n])
            of = f"{training.global_batch_size:,} sequences of {training.seq_len:,} tokens"
            print_lines(f"  an epoch      {sequences:,.0f} sequences, {in_steps:,.1f} steps of {of}")


def realized_shares(mixture: Mixture, num_streams: int, sequences: int) -> list[float]:
    """The share of each source in the run's first sequences."""
    counts = [0] * len(mixture.shares)
    for n in range(sequences):
        counts[mixture.source(n % num_streams, n // num_streams)] += 1
    return [count / sequences for count in counts]


def describe_token_files(source: Tokens, seq_len: int) -> float:
    """Print the statistics of token files; return their number of sequences."""
    files = source.files()
    formats = [format_of(file) for file in files]
    opened = [open_tokens(file, source.config.dtype) for file in files]
    sizes = [*map(len, opened)]
    lengths: list[int] = []
    for file, each, size in zip(files, formats, sizes, strict=True):
        if each.documents(file) is not None:
            starts = each.positions(file)
            lengths += np.diff(starts.read(0, starts.num_documents), append=size).tolist()
    size = sum(size_of(file) for file in files)
    print_lines(f"  size          {counted(len(files), 'file')}, {counted(size, 'byte')}")
    types = sorted({f"{each.name}, {array.dtype.name}" for each, array in zip(formats, opened, strict=True)})
    print_lines(f"  format        {'; '.join(types)}")
    print_lines(f"  tokens        {sum(sizes):,}")
    for folder, manifest in manifests_of(files).items():
        print_lines(f"  made by       {manifest['tokenizer']['description']} (in {folder})")
        print_lines(f"  fingerprint   {manifest['tokenizer']['fingerprint']}")
        if versions := [f"{name} {version}" for name, version in manifest.get("made_with", {}).items()]:
            print_lines(f"  versions      {', '.join(versions)}")
        for made_from in manifest["sources"]:
            facts = ", ".join(f"{key} {made_from[key]}" for key in ("files", "bytes", "content") if key in made_from)
            print_lines(f"  made from     {made_from['name']}: {facts}")
    if lengths:
        print_lines(f"  documents     {len(lengths):,}")
        print_lines(f"  tokens each   {describe_lengths(lengths)}")
    elif source.has_documents:
        print_lines(f"  documents     not counted: id {source.config.eos} separates them")
    else:
        print_lines("  documents     unknown: no files beside the token files record them")
    return sum(max(0, size - 1) // seq_len for size in sizes)


def describe_text(
    source: TextSource, data: DataConfig, tokenizer: Tokenizer, seq_len: int, *, reads_all: bool
) -> float:
    """Print the statistics of a text source; return its number of sequences, estimated if only a sample was read."""
    index = open_index(source, data.max_piece_bytes)
    flags = index.records[:, Piece._fields.index("flags")]
    begins = np.flatnonzero(flags & (STARTS_DOCUMENT | BAD_FILE))
    documents = int(np.count_nonzero(flags & STARTS_DOCUMENT))
    size = [counted(len(index.files), "file"), counted(index.text_bytes, "byte"), counted(len(index), "piece")]
    print_lines(f"  size          {', '.join(size)}")
    chosen = np.arange(len(begins))
    if not reads_all and len(begins) > SAMPLED_DOCUMENTS:
        chosen = np.sort(shuffled(len(begins), data.seed)[:SAMPLED_DOCUMENTS])
    read = "all" if len(chosen) == len(begins) else f"{len(chosen):,} of them, drawn at random, were"
    print_lines(f"  {'conversations' if source.config.is_chat else 'documents    '} {documents:,}; {read} read")
    ends = np.append(begins[1:], len(index))
    ranges = [range(begins[n], ends[n]) for n in chosen.tolist()]
    too_long = source.config.too_long if source.config.is_chat else None
    found = read_documents(TextEncoder(replace(data, sources=(source.config,)), tokenizer), ranges, seq_len, too_long)
    about = "" if len(chosen) == len(begins) else "about "
    scale = index.text_bytes / found.size if found.size else 0.0
    if found.lengths:
        tokens = sum(found.lengths)
        print_lines(f"  tokens        {about}{tokens * scale:,.0f}, {tokens / found.size:.3f} per byte")
        print_lines(f"  tokens each   {describe_lengths(found.lengths)}")
    print_lines(f"  bad rows      {found.bad_rows:,} of {counted(found.pieces, 'piece')} read")
    for fault in found.faults:
        print_lines(f"                {fault}")
    if found.lengths and too_long is not None:
        share, over = found.trained / sum(found.lengths), found.too_long / len(found.lengths)
        print_lines(f"  trained on    {share:.1%} of the tokens (loss_on = {source.config.loss_on})")
        what = f"have more than training.seq_len + 1 = {seq_len + 1:,} tokens (too_long = {too_long})"
        print_lines(f"  too long      {found.too_long:,} of those read, {over:.1%}, {what}")
        print_lines(
            f"  left out      {found.packed.count([0]):,} of those read have no token to train on in a sequence"
        )
    lengths = list(chain.from_iterable(found.packed))
    for n, packing in enumerate(get_args(Packing) if found.lengths else ()):
        padding, cut = packing_shares(found.packed, seq_len, packing, cuts=too_long is None)
        rest = f", {cut:.2%} of the documents cut" if too_long is None else ""
        print_lines(f"  {'' if n else 'packing':<12}  {packing}: {padding:.2%} padding{rest}")
    return scale * num_sequences(lengths, seq_len, data.packing, cuts=too_long is None)


def packing_shares(
    documents: Sequence[Sequence[int]], seq_len: int, packing: Packing, *, cuts: bool
) -> tuple[float, float]:
    """The share of padding with this data.packing, and the share of documents that are cut, or consist of pieces.

    documents: tokens of their pieces. cuts: see packed_lengths.
    """
    packed = packed_lengths(list(chain.from_iterable(documents)), seq_len, packing, cuts=cuts)
    used = sum(min(length, seq_len) for length in packed)
    num_cut, end = 0, 0
    for pieces in documents:
        begin, end = end, end + sum(pieces)
        first = begin // seq_len * seq_len if packing == "concatenate" else begin  # of the sequence with its beginning
        num_cut += cuts and (end > first + seq_len + 1 or len(pieces) > 1)
    return 1 - used / max(1, len(packed) * seq_len), num_cut / len(documents)


def read_documents(
    encoder: TextEncoder, documents: Sequence[range], seq_len: int, too_long: TooLong | None
) -> Statistics:
    """Read and tokenize documents, each given by its pieces. Raises UserError if a file cannot be read.

    too_long: of conversations; None: they are documents.
    """
    found = Statistics()
    bar = tqdm(total=len(documents), desc="reading", unit=" documents", disable=not sys.stderr.isatty(), leave=False)
    for begin in range(0, len(documents), BATCH_DOCUMENTS):
        batch = documents[begin : begin + BATCH_DOCUMENTS]
        pieces = [piece for document in batch for piece in document]
        found.pieces += len(pieces)
        found.size += sum(encoder.corpus.num_bytes(piece) for piece in pieces)
        sizes, in_sequence = list[int](), list[int]()
        for piece in encoder.fetch(pieces):
            if isinstance(piece, TokenPiece):
                sizes.append(len(piece.tokens))
                in_sequence += piece_lengths([piece], seq_len, too_long)
                if too_long is not None:
                    found.trained += len(piece.tokens) if piece.trained is None else int(piece.trained.sum())
                    found.too_long += len(piece.tokens) > seq_len + 1
                continue
            if not isinstance(piece, BadRowError):
                raise piece
            sizes.append(0)
            in_sequence.append(0)
            found.bad_rows += 1
            found.faults += [str(piece)] if found.bad_rows <= SHOWN_BAD_ROWS else []
        lengths, packed = iter(sizes), iter(in_sequence)
        for document in batch:
            length, parts = sum(islice(lengths, len(document))), list(islice(packed, len(document)))
            found.lengths += [length] if length else []
            found.packed += [parts] if length else []
        bar.update(len(batch))
    bar.close()
    return found


def describe_lengths(lengths: Sequence[int]) -> str:
    """Mean, percentiles and maximum, in one line."""
    values = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    between = ", ".join(f"{percent} %: {value:,.0f}" for percent, value in values)
    return f"mean {np.mean(lengths):,.1f}; {between}; longest {max(lengths):,}"


if __name__ == "__main__":
    run_command(main)
