"""Command: train a byte-level BPE tokenizer on the sources of a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from titanlite.config.value_types import literal
from titanlite.data.bpe import MIN_VOCAB_SIZE, special_tokens_fault, train_bpe
from titanlite.data.corpus import TextCorpus
from titanlite.data.kinds import text_sources
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import (
    ConfigFile,
    Folder,
    OptionalCount,
    print_lines,
    read_options_and_overrides,
    run_command,
)
from titanlite.tools.documents import config_of_data, piece_bytes, pieces_with_progress
from titanlite.tools.outputs import new_output, require_new
from titanlite.tools.usable_rows import UsableRows


@dataclass(frozen=True)
class Options:
    """Train a byte-level BPE tokenizer on a configuration's data.

    Override a key of CONFIG by --section.key VALUE, as for training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    out: Folder
    """new folder for tokenizer.json"""
    vocab_size: OptionalCount = setting(
        None, "leave room for a token for each byte, EOS, and the merges", least=MIN_VOCAB_SIZE
    )
    """number of tokens; None: model.vocab_size"""
    special_tokens: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TOKEN ...")] = ()
    """special tokens beside EOS, such as those of a chat template: "<|user|>" "<|assistant|>" """


def main(argv: Sequence[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json into a new folder. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "train-tokenizer")
    config = config_of_data(options, overrides, problems, needs_tokenizer=False)
    require_new(options.out)
    vocab_size = options.vocab_size or config.hyper_parameters.vocab_size
    if problems := check_vocabulary(options, vocab_size):
        raise ConfigError(problems)
    texts, rows = TextCorpus(text_sources(config.data.sources), piece_bytes(config)), UsableRows(config.data)
    with new_output(options.out) as folder:
        folder.mkdir()
        read = (texts.plain_text(piece) for piece in pieces_with_progress(texts, "reading"))
        train_bpe(rows.of(read), vocab_size, folder, options.special_tokens)
    tokenizer = Tokenizer(options.out / "tokenizer.json")
    rest = f"trained on {texts.description}; {counted(rows.bad_rows, 'bad row')}"
    print_lines(tokenizer.description, rest, "to use it:", "", "[model]", f"vocab_size = {tokenizer.vocab_size}", "")
    print_lines("[tokenizer]", f"path = {literal(str(options.out))}")


def check_vocabulary(options: Options, vocab_size: int) -> list[Problem]:
    """Problems of the special tokens, and of a vocabulary without room for them."""
    tokens = options.special_tokens
    if fault := special_tokens_fault(tokens):
        return [Problem("--special-tokens", " ".join(tokens), fault, "change or remove the token")]
    least = MIN_VOCAB_SIZE + len(tokens)
    key = "model.vocab_size" if options.vocab_size is None else "--vocab-size"
    rule = f"at least {least}: a token for each byte, EOS, and {counted(len(tokens), 'special token')}"
    return [] if vocab_size >= least else [Problem(key, vocab_size, rule, f"write {least} or more")]


if __name__ == "__main__":
    run_command(main)
