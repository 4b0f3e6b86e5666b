"""Tokenizers: a `tokenizer.json` from anywhere, or one trained on the corpus at hand."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from titanlite.data.bpe import MIN_VOCAB_SIZE, train_on_python_stdlib
from titanlite.data.sources import SourceConfig, find_files
from titanlite.data.token_files import manifests_of
from titanlite.runtime.errors import Problem, UserError, require

QUICKSTART_VOCAB_SIZE = 4096
TOKENIZER_FOLDER = "tokenizer"
"""Where a run keeps a copy of its tokenizer, inside job.dump_folder."""
CHAT_TEMPLATE = "chat_template.jinja"
MAKE_ONE = "python -m titanlite.tools.train_tokenizer CONFIG --out DIR"


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer turns text into tokens."""

    path: str = ""
    """A tokenizer.json or its folder. Empty: none (tokens), or one trained on the corpus (python-stdlib)."""
    bos: str = ""
    """Text of the token that starts a document; default: from a tokenizer_config.json beside it, else none."""
    eos: str = ""
    """Text of the token that ends a document; default: from a tokenizer_config.json beside it, else none."""


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


def check_tokenizer(
    section: TokenizerConfig, *, sources: Sequence[SourceConfig], vocab_size: int, add_bos: bool
) -> list[Problem]:
    """Problems of the [tokenizer] section, found by loading it. vocab_size: the model's; 0 or less: not known."""
    if not section.path:
        return _check_without_path(section, sources, vocab_size, add_bos)
    file = tokenizer_file(section.path)
    if not file.is_file():
        rule = "a tokenizer.json, or a folder that holds one"
        remedy = f"there is no file {file.absolute()}; {MAKE_ONE} makes one from your own data"
        return [Problem("tokenizer.path", section.path, rule, remedy)]
    try:
        tokenizer = Tokenizer(file)
    except UserError as error:
        remedy = f"{error}; {MAKE_ONE} makes one from your own data"
        return [Problem("tokenizer.path", section.path, "a tokenizer of the tokenizers library", remedy)]
    problems: list[Problem] = []
    for name, text in (("bos", section.bos), ("eos", section.eos)):
        rule, remedy = "a token of the vocabulary", f"write a token that {file} has, or leave {name} out"
        problems += require(not text or tokenizer.knows(text), f"tokenizer.{name}", text, rule, remedy)
    if add_bos and not section.bos and tokenizer.bos_id is None:
        rule = "needs a tokenizer whose BOS token is known"
        problems.append(Problem("data.add_bos", True, rule, "write tokenizer.bos, or data.add_bos = false"))
    if 0 < vocab_size < tokenizer.vocab_size:
        rule = f"at least the tokenizer's {tokenizer.vocab_size} ({file})"
        remedy = f"write vocab_size = {tokenizer.vocab_size} in [model], or use another tokenizer.path"
        problems.append(Problem("model.vocab_size", vocab_size, rule, remedy))
    return problems or _check_made_by(section, sources)


def _check_made_by(section: TokenizerConfig, sources: Sequence[SourceConfig]) -> list[Problem]:
    """Whether token files that name their tokenizer name this one. What else is wrong with them is not said here."""
    try:
        manifests = [manifests_of(find_files(source)) for source in sources if source.kind == "tokens"]
    except UserError:
        return []
    made_by = {folder: manifest["tokenizer"] for found in manifests for folder, manifest in found.items()}
    if not made_by:
        return []
    configured = Tokenizer(tokenizer_file(section.path), bos=section.bos, eos=section.eos)
    for folder, maker in made_by.items():
        if maker["fingerprint"] != configured.fingerprint:
            rule = f"the tokenizer, BOS and EOS of the token files in {folder}: {maker['description']}"
            remedy = f"this one is another ({configured.description}): write that one, or leave [tokenizer] out"
            return [Problem("tokenizer.path", section.path, rule, remedy)]
    return []


def _check_without_path(
    section: TokenizerConfig, sources: Sequence[SourceConfig], vocab_size: int, add_bos: bool
) -> list[Problem]:
    kinds = {source.kind for source in sources}
    needing = sorted(kinds & {"text", "jsonl", "parquet", "hf"})
    if needing:
        rule = f"required for {' and '.join(needing)} sources"
        remedy = f"write the path of a tokenizer.json, or make one: {MAKE_ONE}"
        return [Problem("tokenizer.path", section.path, rule, remedy)]
    problems: list[Problem] = []
    for name, text in (("bos", section.bos), ("eos", section.eos)):
        problems += require(
            not text,
            f"tokenizer.{name}",
            text,
            "only with a tokenizer.path",
            f"leave {name} out, or write tokenizer.path",
        )
    if "python-stdlib" in kinds:
        problems += require(
            not add_bos, "data.add_bos", add_bos, "the tokenizer that is trained here has only an EOS", "write false"
        )
        if 0 < vocab_size < MIN_VOCAB_SIZE:
            rule = f"at least {MIN_VOCAB_SIZE}: one token for each byte, and EOS"
            problems.append(
                Problem("model.vocab_size", vocab_size, rule, f"write vocab_size = {QUICKSTART_VOCAB_SIZE}")
            )
    return problems


def prepare_tokenizer(
    section: TokenizerConfig, sources: Sequence[SourceConfig], *, vocab_size: int
) -> Tokenizer | None:
    """The tokenizer of a run; None where the data is tokens and no path is given.

    Without a path it is trained on the standard library's training split, min(4096, vocab_size) tokens, by the first
    process that needs it, and kept in the cache folder. Raises UserError.
    """
    if section.path:
        return Tokenizer(tokenizer_file(section.path), bos=section.bos, eos=section.eos)
    if any(source.kind == "python-stdlib" for source in sources):
        return Tokenizer(train_on_python_stdlib(min(QUICKSTART_VOCAB_SIZE, vocab_size)))
    return None
