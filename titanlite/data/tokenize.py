"""Command: tokenize the sources of a configuration into one flat array of token ids.

python -m titanlite.data.tokenize CONFIG --out DIR_OR_FILE [--section.key value ...]
"""

import argparse
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.values import literal
from titanlite.data.command import (
    UsableRows,
    appears_complete,
    open_texts,
    parse_arguments,
    pieces_with_progress,
    require_new,
    run_command,
)
from titanlite.data.corpus import TextCorpus, Tokens
from titanlite.data.tokenizer import prepare_tokenizer
from titanlite.models import resolve_model

BATCH_PIECES = 256
HEADER_BYTES = 128


def main(argv: Sequence[str]) -> None:
    """Write a new .npy of uint16, or uint32 where the vocabulary needs it. Raises UserError.

    The tokens are those of all documents in source order, BOS and EOS as in training: what one unshuffled stream reads.
    """
    parser = argparse.ArgumentParser(
        "titanlite.data.tokenize", description="Tokenize sources into a .npy file.", allow_abbrev=False
    )
    parser.add_argument("--out", required=True, type=Path, help="a new .npy file, or a folder for tokens.npy")
    own, config = parse_arguments(parser, argv, needs_tokenizer=True)
    data = config.data
    out = own.out if own.out.suffix == ".npy" else own.out / "tokens.npy"
    require_new(out)
    _, model = resolve_model(config.model)
    tokenizer = prepare_tokenizer(config.tokenizer, data.sources, vocab_size=model.vocab_size)
    assert tokenizer is not None
    print(f"tokenizer: {tokenizer.description}")
    texts, rows = open_texts(config), UsableRows(data)
    corpus = TextCorpus(texts, tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)
    batches = _batches(pieces_with_progress(texts, "tokenizing"))
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    with appears_complete(out) as file:
        count = write_tokens(file, (tokens for batch in batches for tokens in rows.of(corpus.fetch(batch))), dtype)
    print(f"{out}: {count:,} tokens, {dtype.name}, from {texts.description}; {rows.bad_rows:,} bad rows\nto use it:\n")
    print(
        f'[model]\nvocab_size = {tokenizer.vocab_size}\n\n[[data.sources]]\nkind = "tokens"\npath = {literal(str(out))}'
    )


def _batches(pieces: Iterator[int]) -> Iterator[list[int]]:
    while batch := list(islice(pieces, BATCH_PIECES)):
        yield batch


def write_tokens(path: Path, parts: Iterable[Tokens], dtype: np.dtype[Any]) -> int:
    """Write a 1-D .npy of unknown length, part by part; the number of tokens."""
    count = 0
    with open(path, "wb") as file:
        file.write(_npy_header(0, dtype))
        for tokens in parts:
            tokens.astype(dtype).tofile(file)
            count += len(tokens)
        file.seek(0)
        file.write(_npy_header(count, dtype))
    return count


def _npy_header(count: int, dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy file of `count` elements; of the same size for every count."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == HEADER_BYTES
    return header.getvalue()


if __name__ == "__main__":
    run_command(main)
