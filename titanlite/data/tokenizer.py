"""Tokenizers of the `tokenizers` library: a `tokenizer.json` from anywhere."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from titanlite.runtime.errors import UserError

TOKENIZER_FOLDER = "tokenizer"
"""Where a run keeps a copy of its tokenizer, inside job.dump_folder."""
CHAT_TEMPLATE = "chat_template.jinja"


class Tokenizer:
    """A tokenizer of the `tokenizers` library, for documents: no special tokens are added, nothing is truncated.

    Text that reads like a special token is text: no document contains a BOS or EOS. vocab_size: the largest id + 1.
    bos_id, eos_id: None where there is none. description: what was chosen and from where, in one line. fingerprint: 64
    hex digits that stand for all that decides which tokens a text becomes: the file's bytes, bos_id and eos_id.
    arguments: those that make the same one.
    """

    def __init__(self, file: Path, *, bos: str = "", eos: str = "") -> None:
        """Raises UserError where the file is no tokenizer or its vocabulary lacks `bos` or `eos`."""
        self.arguments = {"file": str(file), "bos": bos, "eos": eos}
        try:
            self._data = file.read_bytes()  # kept, since a new run may rename the folder that it is from
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._data)
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"{file} is not a tokenizer.json that can be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._config_beside = _config_beside(file)
        template = file.with_name(CHAT_TEMPLATE)
        self._chat_template = template.read_bytes() if template.is_file() else None
        beside = _named_in(self._config_beside)
        self.bos_id, bos_text = self._separator("bos", bos, beside)
        self.eos_id, eos_text = self._separator("eos", eos, beside)
        separators = json.dumps([self.bos_id, self.eos_id]).encode()
        self.fingerprint = hashlib.sha256(hashlib.sha256(self._data).digest() + separators).hexdigest()
        self.description = f"{file}: {self.vocab_size:,} tokens, BOS {bos_text}, EOS {eos_text}"

    def save(self, folder: Path) -> None:
        """Writes what transformers' AutoTokenizer reads, and what makes the same Tokenizer again. Raises OSError.

        tokenizer.json as it is; tokenizer_config.json, the one beside it with the BOS and EOS that are used here;
        a chat template, where there is one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._config_beside
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            config[name] = None if token_id is None else self._tokenizer.id_to_token(token_id)
        config.pop("auto_map", None)  # it names code, which is not ours to hand on
        (folder / "tokenizer.json").write_bytes(self._data)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self._chat_template is not None:
            (folder / CHAT_TEMPLATE).write_bytes(self._chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; the work is done outside Python's lock, on several cores."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self) -> list[int] | None:
        """The bytes of text that each id stands for; None unless the tokenizer is byte-level: else tokens do not say.

        They add up to the bytes of the text, as far as the tokenizer does not normalize it. Special tokens, such as BOS
        and EOS, stand for no text.
        """
        if "ByteLevel" not in self._decoders():
            return None
        sizes = [0] * self.vocab_size
        for text, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[token_id] = len(text)  # a character for each byte
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token_id] = 0 if token.special else len(token.content.encode())
        return sizes

    def byte_tokens(self) -> frozenset[int]:
        """Ids of the tokens "<0xE2>" of a vocabulary with byte fallback; empty for any other.

        Their text is known where a run of them ends: one that is not UTF-8 as a whole is not decoded in part either.
        """
        if "ByteFallback" not in self._decoders():
            return frozenset()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    def _decoders(self) -> set[str]:
        """Types of the steps that make text of tokens."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {"type": "none"}
        return {part["type"] for part in (decoder, *decoder.get("decoders", ()))}

    def has(self, token_id: int) -> bool:
        """Whether the id is that of a token: a model's vocabulary may be larger."""
        return self._tokenizer.id_to_token(token_id) is not None

    def knows(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        return self._tokenizer.token_to_id(text) is not None

    def _separator(self, name: str, chosen: str, beside: dict[str, str]) -> tuple[int | None, str]:
        """Id of the token, and what to say about it."""
        text = chosen or beside.get(name, "")
        if not text:
            return None, "none"
        token_id = self._tokenizer.token_to_id(text)
        if token_id is None and chosen:
            raise UserError(f"the vocabulary has no token {chosen!r}")
        origin = f"tokenizer.{name}" if chosen else "tokenizer_config.json"
        if token_id is None:
            return None, f"none ({origin} names {text!r}, which the vocabulary lacks)"
        return token_id, f"{text!r} = {token_id} ({origin})"


def _config_beside(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside `file`; {} where there is none. Raises UserError."""
    config_file = file.with_name("tokenizer_config.json")
    if not config_file.is_file():
        return {}
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config_file} is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _named_in(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos": text, "eos": text} as far as a tokenizer_config.json names them."""
    found = {}
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            found[name] = text
    return found


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json that tokenizer.path means: itself, or the one in the folder."""
    full = Path(os.path.expanduser(path))
    return full / "tokenizer.json" if full.is_dir() else full
