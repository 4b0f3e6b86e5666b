"""Tokenizers: a `tokenizer.json` from anywhere, or one trained on the corpus at hand."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer turns text into tokens."""

    path: str = ""
    """A tokenizer.json or its folder. Empty: none (tokens), or one trained on the corpus (python-stdlib)."""
    bos: str = ""
    """Text of the token that starts a document; default: from a tokenizer_config.json beside it, else none."""
    eos: str = ""
    """Text of the token that ends a document; default: from a tokenizer_config.json beside it, else none."""
