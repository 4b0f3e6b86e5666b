"""Command: train a byte-level BPE tokenizer on the sources of a configuration.

python -m titanlite train-tokenizer CONFIG --out DIR [--vocab_size N] [--section.key value ...]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanlite.config.fields import literal
from titanlite.data.bpe import MIN_VOCAB_SIZE, QUICKSTART_VOCAB_SIZE, train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError
from titanlite.tools.command import appears_complete, require_new, run_command
from titanlite.tools.documents import UsableRows, open_texts, parse_arguments, pieces_with_progress


def main(argv: Sequence[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json into a new folder. Raises UserError."""
    parser = argparse.ArgumentParser(
        "titanlite train-tokenizer", description="Train a byte-level BPE tokenizer.", allow_abbrev=False
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder for tokenizer.json")
    parser.add_argument(
        "--vocab_size", type=int, default=QUICKSTART_VOCAB_SIZE, metavar="N", help="default: %(default)s"
    )
    own, config = parse_arguments(parser, argv, needs_tokenizer=False)
    if own.vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"--vocab_size {own.vocab_size}: at least {MIN_VOCAB_SIZE}, one for each byte, and EOS")
    require_new(own.out)
    texts, rows = open_texts(config), UsableRows(config.data)
    with appears_complete(own.out) as folder:
        folder.mkdir()
        read = (texts.read(piece) for piece in pieces_with_progress(texts, "reading"))
        train_bpe(rows.of(read), own.vocab_size, folder)
    tokenizer = Tokenizer(own.out / "tokenizer.json")
    print(f"{tokenizer.description}\ntrained on {texts.description}; {rows.bad_rows:,} bad rows\nto use it:\n")
    print(f"[model]\nvocab_size = {tokenizer.vocab_size}\n\n[tokenizer]\npath = {literal(str(own.out))}")


if __name__ == "__main__":
    run_command(main)
