"""Command: train a byte-level BPE tokenizer on the sources of a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.fields import literal
from titanlite.data.bpe import MIN_VOCAB_SIZE, train_bpe
from titanlite.data.corpus import Texts
from titanlite.data.kinds import text_sources
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.registry import resolve_model
from titanlite.runtime.errors import ranged
from titanlite.runtime.text import counted
from titanlite.tools.command import (
    ConfigFile,
    Folder,
    OptionalCount,
    appears_complete,
    read_options_and_overrides,
    require_new,
    run_command,
)
from titanlite.tools.documents import UsableRows, config_of_data, piece_bytes, pieces_with_progress


@dataclass(frozen=True)
class Options:
    """Train a byte-level BPE tokenizer on a configuration's data.

    Override a key of CONFIG by --section.key VALUE, as for training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    out: Folder
    """new folder for tokenizer.json"""
    vocab_size: OptionalCount = ranged(
        None, "leave room for a token for each byte, EOS, and the merges", least=MIN_VOCAB_SIZE
    )
    """number of tokens; None: model.vocab_size"""


def main(argv: Sequence[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json into a new folder. Raises UserError."""
    options, overrides = read_options_and_overrides(Options, argv, "train-tokenizer")
    config = config_of_data(options, overrides, needs_tokenizer=False)
    require_new(options.out)
    texts, rows = Texts(text_sources(config.data.sources), piece_bytes(config)), UsableRows(config.data)
    with appears_complete(options.out) as folder:
        folder.mkdir()
        read = (texts.read(piece) for piece in pieces_with_progress(texts, "reading"))
        train_bpe(rows.of(read), options.vocab_size or resolve_model(config.model)[1].vocab_size, folder)
    tokenizer = Tokenizer(options.out / "tokenizer.json")
    print(f"{tokenizer.description}\ntrained on {texts.description}; {counted(rows.bad_rows, 'bad row')}\nto use it:\n")
    print(f"[model]\nvocab_size = {tokenizer.vocab_size}\n\n[tokenizer]\npath = {literal(str(options.out))}")


if __name__ == "__main__":
    run_command(main)
