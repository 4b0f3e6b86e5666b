"""Tokenizers of the `tokenizers` library, loaded from a `tokenizer.json`."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_json, read_regular
from titanlite.runtime.text import counted

TOKENIZER_FOLDER = "tokenizer"
"""Folder of the copy of a run's tokenizer, inside job.dump_folder."""
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MAX_GROWTH = 10_000
"""Limit of how many times longer normalization may make a text."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library, for documents: adds no special tokens, truncates nothing.

    The text of a special token inside a document is encoded as plain text, so no document contains BOS or EOS.
    vocab_size: the largest id + 1. bos_id, eos_id: None if the tokenizer has no such token. description: file, size,
    BOS and EOS with their origin, in one line. fingerprint: 64 hex digits, a hash of the file, bos_id and eos_id.
    content: of the tokenizer.json. chat_template: its Jinja text, or None. unused_templates: names of those in the
    tokenizer_config.json if none of them is "default", the one that is used. special_tokens: name -> text
    of BOS, EOS and the others of the tokenizer_config.json, such as pad_token. arguments: file, bos, eos and
    chat_template, to construct the same tokenizer again.
    """

    def __init__(self, file: Path | str, *, bos: str = "", eos: str = "", chat_template: str = "") -> None:
        """chat_template: a file; default: chat_template.jinja beside `file`, else that of the tokenizer_config.json.

        Raises UserError if the file is not a tokenizer, its vocabulary lacks `bos` or `eos`, or a file cannot be read.
        """
        file = Path(file)
        self.arguments = {"file": str(file), "bos": bos, "eos": eos, "chat_template": chat_template}
        try:
            self.content = read_regular(file)  # kept for save(): a new run may rename the folder
            _require_bounded_normalizer(json.loads(self.content))
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        except (AttributeError, KeyError, TypeError):
            reason = "it is not a JSON object with a valid normalizer"
            raise UserError(f"{file} is not a readable tokenizer.json: {reason}") from None
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"{file} is not a readable tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._config_beside = _config_beside(file)
        beside = str(file.with_name(CHAT_TEMPLATE))
        template = chat_template or (beside if os.path.lexists(beside) else "")
        self._template_file_text = read_chat_template(template) if template else None
        self.chat_template = self._template_file_text
        if self.chat_template is None:
            self.chat_template = _chat_template_of(self._config_beside, file.with_name(TOKENIZER_CONFIG))
        self.unused_templates = () if self.chat_template is not None else _template_names(self._config_beside)
        separators = _separators(self._config_beside, file.with_name(TOKENIZER_CONFIG))
        self.bos_id, bos_text = self._separator("bos", bos, separators)
        self.eos_id, eos_text = self._separator("eos", eos, separators)
        self.special_tokens = _named_tokens(self._config_beside)
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            self.special_tokens.pop(name, None)
            if token_id is not None:
                self.special_tokens[name] = str(self._tokenizer.id_to_token(token_id))
        usable = self._tokenizer.get_vocab_size(with_added_tokens=True) - len({self.bos_id, self.eos_id} - {None})
        if usable < 2:
            raise UserError(
                f"{file} has {counted(usable, 'token')} besides BOS and EOS, so there is nothing to predict: give "
                "another tokenizer"
            )
        ids = json.dumps([self.bos_id, self.eos_id]).encode()
        self.fingerprint = hashlib.sha256(hashlib.sha256(self.content).digest() + ids).hexdigest()
        self.description = f"{file}: {self.vocab_size:,} tokens, BOS {bos_text}, EOS {eos_text}"

    def save(self, folder: Path) -> None:
        """Write files that transformers' AutoTokenizer and this class can load. Raises OSError.

        tokenizer.json: unchanged. tokenizer_config.json: the original with the BOS and EOS in use. chat_template.jinja:
        the chat template, if any; a list of templates in the original tokenizer_config.json stays there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._config_beside
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            config[name] = None if token_id is None else self._tokenizer.id_to_token(token_id)
        config.pop("auto_map", None)  # it names code, which is not copied
        template = self._template_file_text
        if template is None and isinstance(config.get("chat_template"), str):
            template = self.chat_template
        if template is not None:
            config.pop("chat_template", None)
        (folder / "tokenizer.json").write_bytes(self.content)
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if template is not None:
            (folder / CHAT_TEMPLATE).write_bytes(template.encode())

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The special tokens, such as BOS, that the post-processor of tokenizer.json puts before a text.

        transformers adds them where this class does not, and documents of a run have none of them.
        """
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        is_special = encoded.special_tokens_mask
        return tuple(encoded.ids[: is_special.index(0)]) if 0 in is_special else ()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, computed outside the GIL on several cores.

        Raises UserError if a text cannot be encoded: if the vocabulary lacks a part of it and has no unknown token.
        """
        try:
            return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"the tokenizer {self.arguments['file']} cannot encode it: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self) -> list[int] | None:
        """Number of text bytes per token id; None unless the tokenizer is byte-level.

        The counts of a text's tokens add up to its bytes, unless the tokenizer normalizes text. Special tokens, such as
        BOS and EOS, count 0.
        """
        if "ByteLevel" not in self._decoders():
            return None
        sizes = [0] * self.vocab_size
        for text, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[token_id] = len(text)  # one character per byte
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token_id] = 0 if token.special else len(token.content.encode())
        return sizes

    def byte_tokens(self) -> frozenset[int]:
        """Ids of the byte tokens, such as "<0xE2>", of a vocabulary with byte fallback; empty for other vocabularies.

        A run of byte tokens can be decoded only after its end: if the run is not valid UTF-8, no part of it is decoded.
        """
        if "ByteFallback" not in self._decoders():
            return frozenset()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    def _decoders(self) -> set[str]:
        """Types of the decoder and its steps."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {"type": "none"}
        return {part["type"] for part in (decoder, *decoder.get("decoders", ()))}

    def has(self, token_id: int) -> bool:
        """Whether `token_id` is in the vocabulary. A model may have more ids than its tokenizer, so it may generate ids
        that have no text."""
        return self._tokenizer.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, which has no text of its own, such as BOS and EOS."""
        return token_id in self._special_ids

    def is_token(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        return self._tokenizer.token_to_id(text) is not None

    def _separator(self, name: str, chosen: str, beside: dict[str, str]) -> tuple[int | None, str]:
        """Id and description of BOS or EOS; the id is None if there is no such token.

        name: "bos" or "eos". chosen: the token in the configuration, "" if none is given. beside: the tokens of the
        tokenizer_config.json. Raises UserError if the chosen token is not in the vocabulary.
        """
        text = chosen or beside.get(name, "")
        if not text:
            return None, "none"
        token_id = self._tokenizer.token_to_id(text)
        if token_id is None and chosen:
            raise UserError(f"tokenizer.{name} = {chosen!r} is not a token of the vocabulary")
        origin = f"tokenizer.{name}" if chosen else "tokenizer_config.json"
        if token_id is None:
            return None, f"none ({origin} names {text!r}, which is not in the vocabulary)"
        return token_id, f"{text!r} = {token_id} ({origin})"


def _require_bounded_normalizer(tokenizer: dict[str, Any]) -> None:
    """Raise ValueError if normalization may make a text more than MAX_GROWTH times longer.

    Chained replacements multiply: a small file could request any amount of memory. Unicode normal forms, which grow
    a text at most 18 times, and the tables of SentencePiece ("Precompiled") are not counted.
    """
    growth = 1
    waiting = [tokenizer.get("normalizer")]
    while waiting:
        step = waiting.pop() or {}
        waiting += step.get("normalizers", ())
        if step.get("type") == "Replace":
            literal = step["pattern"].get("String")
            # A regular expression may match the empty string between all characters.
            growth *= max(1, -(-len(step["content"]) // len(literal))) if literal else len(step["content"]) + 1
        elif step.get("type") == "Prepend":
            growth *= max(1, len(step["prepend"]))
        if growth > MAX_GROWTH:
            raise ValueError(f"its normalizer may make a text more than {MAX_GROWTH:,} times longer: remove steps")


def _config_beside(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside `file`; {} if absent. Raises UserError if it cannot be read or is not JSON."""
    config_file = file.with_name(TOKENIZER_CONFIG)
    if not os.path.lexists(config_file):
        return {}
    try:
        config: dict[str, Any] = read_json(config_file)
    except JsonError as error:
        raise UserError(f"{config_file} {error}: fix or remove it") from None
    except OSError as error:
        raise UserError(f"{config_file} cannot be read: {error.strerror or error}") from None
    return config


def read_chat_template(file: str) -> str:
    """The text of a chat template. Raises UserError if the file cannot be read or is not UTF-8."""
    try:
        return read_regular(Path(os.path.expanduser(file))).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 at byte {error.start}: fix or remove it") from None
    except JsonError as error:
        raise UserError(f"{file} {error}: fix or remove it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def _chat_template_of(config: Mapping[str, Any], file: Path) -> str | None:
    """The chat template of a tokenizer_config.json: a text, or the one named "default" of a list. Raises UserError."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = (one for one in found if isinstance(one, dict) and one.get("name") == "default")
        found = next((one.get("template") for one in named), None)
    if not isinstance(found, str | None):
        raise UserError(f"{file} has a chat_template that is not a text: fix or remove it")
    try:
        (found or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{file} has a chat_template with an unpaired surrogate at character {error.start}") from None
    return found


def _template_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a list of chat templates in a tokenizer_config.json."""
    found = config.get("chat_template")
    return tuple(str(one.get("name")) for one in found if isinstance(one, dict)) if isinstance(found, list) else ()


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens of a tokenizer_config.json that have a name, such as pad_token."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _separators(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """{"bos": text, "eos": text} of a tokenizer_config.json; keys it does not set are absent. Raises UserError."""
    found = {}
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str | None):
            raise UserError(f"{file} has {name}_token = {json.dumps(token)}, which is not a text: fix or remove it")
        if text:
            found[name] = text
    return found


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json for a tokenizer.path, which is the file or its folder."""
    full = Path(os.path.expanduser(path))
    return full / "tokenizer.json" if full.is_dir() else full
