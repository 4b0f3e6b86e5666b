"""Training of byte-level BPE tokenizers with the `tokenizers` library, and the tokenizer of a run."""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from titanlite.data.config import TokenizerConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.sources.stored import StoredFile, facts_of
from titanlite.data.sources.tokens import MANIFEST, Tokens
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.data.tokenizer_files import tokenizer_file
from titanlite.runtime.cache import built_once, cached_folder
from titanlite.runtime.durability import replace_file

logger = logging.getLogger("titanlite")

FORMAT_VERSION = 1
EOS = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""256 bytes and EOS."""

QUICKSTART_VOCAB_SIZE = 4096


def train_bpe(texts: Iterator[str], vocab_size: int, folder: Path, special_tokens: Sequence[str] = ()) -> int:
    """Write tokenizer.json and tokenizer_config.json into `folder`; return the number of tokens, at most vocab_size.

    The tokenizer encodes every text, and decoding restores it exactly. The same texts give the same files.
    special_tokens: special tokens beside EOS, see `special_tokens_fault`; they have the ids after EOS, which is 0.
    Raises OSError.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, *special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not Tokenizer.save: its error on a full disk is a plain Exception.
    replace_file(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}, indent=2) + "\n")
    return int(tokenizer.get_vocab_size())


def special_tokens_fault(special_tokens: Sequence[str]) -> str | None:
    """The rule that special tokens break, which a tokenizer shall have beside EOS; None if they can be used.

    A special token must not be one word for the tokenizer: training could merge the word, and plain text would then
    have the id of the special token.
    """
    if EOS in special_tokens:
        return f"without {EOS}, which every tokenizer has as EOS"
    if len(set(special_tokens)) < len(special_tokens):
        return "different texts"
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if any(len(words.pre_tokenize_str(text)) < 2 for text in special_tokens):
        return "texts of several words, such as <|user|>: letters between other characters"
    return None


def train_on_python_stdlib(vocab_size: int) -> Path:
    """Train a BPE on the training split of the standard library, or find it in the cache; return its tokenizer.json.

    Raises UserError if the cache folder cannot be written.
    """
    source = PythonStdlib(SourceConfig(PythonStdlib.kind, split="train"))
    facts = ["bpe", FORMAT_VERSION, tokenizers.__version__, vocab_size, facts_of(source.files())]

    def build(folder: Path) -> None:
        logger.info("training a tokenizer of %s tokens on the Python standard library", f"{vocab_size:,}")
        texts = (file.read_text(encoding="utf-8") for file in source.split_files())
        train_bpe(texts, vocab_size, folder)

    what = "a tokenizer for the Python standard library"
    return built_once(cached_folder("tokenizer", facts), what, build) / "tokenizer.json"


def prepare_tokenizer(
    section: TokenizerConfig, sources: Sequence[SourceConfig], *, vocab_size: int
) -> Tokenizer | None:
    """The tokenizer of a run: of tokenizer.path, else the one kept with the token files; None if all sources are tokens
    without a tokenizer.

    For python-stdlib sources without either, the first process that needs a tokenizer trains one of
    min(4096, vocab_size) tokens on the standard library's training split and stores it in the cache folder. Raises
    UserError.
    """
    template = section.chat_template
    if section.path:
        return Tokenizer(tokenizer_file(section.path), bos=section.bos, eos=section.eos, chat_template=template)
    if kept := kept_tokenizer(sources):
        return Tokenizer(kept, chat_template=template)
    if any(source.kind == PythonStdlib.kind for source in sources):
        return Tokenizer(train_on_python_stdlib(min(QUICKSTART_VOCAB_SIZE, vocab_size)), chat_template=template)
    return None


def kept_tokenizer(sources: Sequence[SourceConfig]) -> Path | None:
    """The tokenizer.json kept with the first token files of these sources that have one, else None.

    `titanlite tokenize` writes it into the folder of tokens.json. A link to a file that does not exist counts, too. A
    stored one is copied into the cache folder.
    """
    for source in sources:
        if source.kind == Tokens.kind:
            for folder in Tokens(source).folders():
                if isinstance(folder, StoredFile):
                    if all((folder / name).exists() for name in (MANIFEST, f"{TOKENIZER_FOLDER}/tokenizer.json")):
                        return folder.copy_of(TOKENIZER_FOLDER) / "tokenizer.json"
                    continue
                file = folder / TOKENIZER_FOLDER / "tokenizer.json"
                if os.path.lexists(file) and os.path.lexists(folder / MANIFEST):
                    return file
    return None
