"""Tokenizers of the `tokenizers` library, loaded from a `tokenizer.json`."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlite.data.post_processor import with_bos
from titanlite.data.tokenizer_files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TEMPLATES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    flags_of,
    read_tokenizer_files,
    text_of,
)
from titanlite.runtime.errors import UserError, is_error
from titanlite.runtime.text import counted, is_visible

TOKENIZER_FOLDER = "tokenizer"
"""Folder of the copy of a run's tokenizer, inside job.dump_folder."""

EDGE = 256
"""Characters on one side of a cut that its tokens usually depend on at most."""

_SPACES = "▁ĠĊĉčċČ"
"""White space in the names of tokens."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library, for documents: adds no special tokens, truncates nothing.

    The text of a special token inside a document is encoded as plain text, so no document contains BOS or EOS.
    vocab_size: the largest id + 1. bos_id, eos_id: None if the tokenizer has no such token. description: file, size,
    BOS and EOS with their origin, in one line. fingerprint: 64 hex digits, a hash of tokenizer.json, bos_id, eos_id and
    the tokens that the files beside it add or change. chat_tokens: those that only conversations have. chat_template:
    its Jinja text, or None. unused_templates: names of those of the folder if none of them is "default", the one that
    is used. special_tokens: name -> text of BOS, EOS and others, such as pad_token. arguments: file, bos, eos and
    chat_template, to construct the same tokenizer again.
    """

    def __init__(self, file: Path | str, *, bos: str = "", eos: str = "", chat_template: str = "") -> None:
        """All files beside `file`, a tokenizer.json, are read; see TokenizerFiles.

        chat_template: a file; default: that of the folder. Raises UserError if the file is not a tokenizer, its
        vocabulary lacks `bos` or `eos`, the files contradict each other, or one cannot be read.
        """
        file = Path(file)
        self.arguments = {"file": str(file), "bos": bos, "eos": eos, "chat_template": chat_template}
        try:
            # All content is kept for save(): a new run may rename the folder.
            self._files = read_tokenizer_files(file, {"bos_token": bos, "eos_token": eos}, chat_template)
            self._tokenizer, known = self._files.open()
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError):
            reason = "it is not a JSON object with valid steps"
            raise UserError(f"{file} is not a readable tokenizer.json: {reason}") from None
        except BaseException as error:  # the library raises bare Exceptions, and panics
            if not is_error(error):
                raise
            raise UserError(f"{file} is not a readable tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        # It adds special tokens, and those that trim offsets may move one behind that of the next token.
        self._post_processor, self._tokenizer.post_processor = self._tokenizer.post_processor, None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        templates = self._files.chat_templates
        self.chat_template = templates.get("default")
        self.unused_templates = () if self.chat_template is not None else tuple(templates)
        changed = {key: token for key, token in sorted(added.items()) if repr(token) != repr(known.get(key))}
        self._is_changed = bool(changed)
        words = {key for key, token in changed.items() if self._tokenizer.model.id_to_token(key) == token.content}
        # Documents have the text of a special token as text, whatever else the files say about it.
        were_special = {key for key, token in known.items() if token.special} | words - known.keys()
        in_chat = [key for key, token in changed.items() if token.special and key in were_special]
        self.chat_tokens = [[key, changed[key].content, flags_of(changed[key])] for key in in_chat]
        others = [[key, token.content, flags_of(token)] for key, token in changed.items() if key not in in_chat]
        self.special_tokens = self._files.texts
        self.bos_id, bos_text = self._separator("bos_token")
        self.eos_id, eos_text = self._separator("eos_token")
        usable = self._tokenizer.get_vocab_size(with_added_tokens=True) - len({self.bos_id, self.eos_id} - {None})
        if usable < 2:
            raise UserError(
                f"{file} has {counted(usable, 'token')} besides BOS and EOS, so there is nothing to predict: give "
                "another tokenizer"
            )
        facts = json.dumps([self.bos_id, self.eos_id, *([others] if others else [])])
        content = hashlib.sha256(self._files.content).digest()
        self.fingerprint = hashlib.sha256(content + facts.encode()).hexdigest()
        count = len(changed.keys() - known.keys() - words)
        beside = f" ({count} of the files beside it)" if count else ""
        self.description = f"{file}: {self.vocab_size:,} tokens{beside}, BOS {bos_text}, EOS {eos_text}"
        if self._files.lacks_characters:
            self.description += ". It has no tokens for some characters or words: texts with them are bad rows"
        if not self._divides_words():
            self.description += (
                ". It does not divide texts into words: where documents of more than data.max_piece_bytes are cut, "
                "tokens may differ from those of the entire document"
            )

    def save(self, folder: Path, *, adds_bos: bool | None = None) -> None:
        """Write files that transformers' AutoTokenizer and this class can load. Raises OSError.

        All files of the tokenizer are kept, with the BOS and EOS in use. tokenizer.json: unchanged, but for BOS before
        a text with adds_bos: whether it is added; None: as it was.
        chat_template.jinja: the chat template, if any; a list of templates in the original tokenizer_config.json stays
        there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = self._files
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(files.config)
        names = dict(files.special_tokens_map)
        for name in ("bos_token", "eos_token"):
            text = self.special_tokens.get(name)
            if text is None or text_of(config.get(name)) != text or "__type" not in config[name]:
                config[name] = text
            if name in names and text_of(names[name]) != text:
                names[name] = text
        config.pop("auto_map", None)  # it names code, which is not copied
        if adds_bos is not None and "add_bos_token" in config:  # some versions of transformers follow it
            config["add_bos_token"] = adds_bos
        templates = dict(files.templates)
        if isinstance(config.get("chat_template"), str):
            templates = files.chat_templates
        if templates:
            config.pop("chat_template", None)
        contents: dict[str, bytes | None] = dict.fromkeys(TOKENIZER_FILES)
        own = files.content if adds_bos is None else self._with_bos(files.content, adds=adds_bos)
        contents |= {TOKENIZER_JSON: own, TOKENIZER_CONFIG: _json(config)}
        contents |= {SPECIAL_TOKENS_MAP: _json(names)} if names else {}
        contents |= {ADDED_TOKENS: _json(files.ids)} if files.ids else {}
        contents |= {f"{TEMPLATES}/{path.name}": None for path in (folder / TEMPLATES).glob("*.jinja")}
        for name, text in templates.items():
            contents[CHAT_TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja"] = text.encode()
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if content is None:
                (folder / name).unlink(missing_ok=True)  # of another tokenizer
            else:
                (folder / name).write_bytes(content)

    @cached_property
    def content(self) -> bytes:
        """A tokenizer.json with the added tokens of all files."""
        if not self._is_changed and not self._files.lacks_characters:
            return self._files.content
        return self._files.with_added(self._tokenizer.get_added_tokens_decoder())

    @property
    def adds_bos(self) -> bool:
        """Whether the post-processor of tokenizer.json puts BOS before a text. This class does not; transformers does,
        and so has a model that was trained with it."""
        return self.bos_id is not None and self.prefix_ids[:1] == (self.bos_id,)

    @property
    def conflict_of_bos(self) -> str:
        """How tokenizer_config.json contradicts adds_bos; "" if it does not."""
        flag = self._files.config.get("add_bos_token")
        if self.bos_id is None or not isinstance(flag, bool) or flag == self.adds_bos:
            return ""
        does = "adds it" if self.adds_bos else "does not add it"
        return (
            f"tokenizer_config.json has add_bos_token = {str(flag).lower()}, which some classes of transformers "
            f"follow, but the post-processor of tokenizer.json {does}"
        )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The special tokens, such as BOS, that the post-processor of tokenizer.json puts before a text."""
        for text in ("a", *self._tokenizer.get_vocab()) if self._post_processor else ():
            # Exceptions: of the library, if it has no tokens for this text.
            with library_errors(f"the tokenizer {self.arguments['file']} cannot encode"), suppress(Exception):
                encoded = self._post_processor.process(self._tokenizer.encode(text))
                if 0 in (is_special := encoded.special_tokens_mask):
                    return tuple(encoded.ids[: is_special.index(0)])
        return ()

    def content_with_bos(self, *, adds: bool) -> bytes:
        """`content` whose post-processor puts BOS before a text, or does not."""
        return self._with_bos(self.content, adds=adds)

    def _with_bos(self, content: bytes, *, adds: bool) -> bytes:
        if self.bos_id is None or adds == self.adds_bos:
            return content
        found = json.loads(content)
        found["post_processor"] = with_bos(
            found["post_processor"], self.special_tokens["bos_token"], self.bos_id, adds=adds
        )
        return json.dumps(found).encode()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, computed outside the GIL on several cores.

        Raises UserError if a text cannot be encoded: if the vocabulary lacks a part of it and has no unknown token.
        """
        return [one.ids for one in self._encodings(self._tokenizer.encode_batch_fast, texts)]

    def encode_parts(self, parts: Sequence[tuple[str, str, str]]) -> list[list[int]]:
        """Token ids of the middle one of three parts of each text: those of the entire text that begin inside it.

        If the first or last part is empty, the middle one has the start or the end of the text. Raises UserError.
        """
        found = self.encode_batch(["".join(each) for each in parts])
        return [self._middle(ids, *each) if each[0] or each[2] else ids for ids, each in zip(found, parts, strict=True)]

    def _middle(self, ids: list[int], before: str, text: str, after: str) -> list[int]:
        """Those of `ids`, the token ids of all three parts, that begin inside `text`.

        Offsets, with which encoding takes 1.7 times as long, are computed beside both ends of `text` only, unless other
        tokens are found there.
        """
        edges = [before + text[:EDGE], text[-EDGE:] + after]
        head, tail = self._encodings(self._tokenizer.encode_batch, edges)
        first = _tokens_until(head, len(before)) if before else 0
        rest = len(tail) - _tokens_until(tail, len(edges[1]) - len(after)) if after else 0
        last = len(ids) - rest
        same = ids[: first + 1] == head.ids[: first + 1] and ids[last - 1 :] == tail.ids[len(tail) - rest - 1 :]
        # In a longer run of spaces, the same token may begin at its last space, or have an added space.
        if same and not text[-EDGE:].isspace():
            return ids[first:last]
        (encoded,) = self._encodings(self._tokenizer.encode_batch, [before + text + after])
        first = _tokens_until(encoded, len(before)) if before else 0
        return ids[first : _tokens_until(encoded, len(before) + len(text)) if after else len(ids)]

    def _encodings(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        with library_errors(f"the tokenizer {self.arguments['file']} cannot encode it"):
            return encode(list(texts), add_special_tokens=False)

    def has_text(self, ids: Sequence[int]) -> bool:
        """Whether the tokens of a text have a visible character, see is_visible."""
        # The first token that is no space, often the first of all, decides.
        texts = (self._tokenizer.id_to_token(token_id) or "" for token_id in ids)
        return any(is_visible(text.strip(_SPACES)) for text in texts) or is_visible(self.decode(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included. Raises UserError."""
        with library_errors(f"the tokenizer {self.arguments['file']} cannot decode tokens"):
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

    def _divides_words(self) -> bool:
        """Whether a text is divided at its spaces, or no token has a space after another character, "▁" and "Ġ" too:
        the tokens of a word then do not depend on other words."""
        normalizer, divider = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        with library_errors(f"the tokenizer {self.arguments['file']} cannot encode text"):
            words = "a b" if normalizer is None else normalizer.normalize_str("a b")
            if divider is not None and len(divider.pre_tokenize_str(words)) > 1:
                return True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        return not any(space in token.lstrip(space) for token in vocabulary for space in " ▁Ġ")

    def _separator(self, name: str) -> tuple[int | None, str]:
        """Id and description of bos_token or eos_token; the id is None if there is no such token."""
        text = self.special_tokens.get(name)
        if not text:
            self.special_tokens.pop(name, None)
            unread = text_of(self._files.special_tokens_map.get(name))
            reason = f" ({SPECIAL_TOKENS_MAP} names {unread!r}, but {TOKENIZER_CONFIG} is used)" if unread else ""
            return None, f"none{reason}"
        token_id = self._tokenizer.token_to_id(text)
        return token_id, f"{text!r} = {token_id} ({self._files.names[name][1]})"


@contextmanager
def library_errors(fault: str) -> Iterator[None]:
    """Raise UserError with `fault` in place of any error of the `tokenizers` library, also a panic."""
    try:
        yield
    except BaseException as error:
        if not is_error(error):
            raise
        raise UserError(f"{fault}: {error}") from None


def _tokens_until(encoded: Any, place: int) -> int:
    """The number of tokens that begin before the character `place`."""
    return bisect_left(range(len(encoded)), place, key=lambda token: encoded.token_to_chars(token)[0])


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
