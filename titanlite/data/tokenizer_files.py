"""The files of a tokenizer's folder, read as `transformers.AutoTokenizer` reads them.

tokenizer.json is a tokenizer; the files beside it add tokens, name BOS and EOS, and have the chat templates.
"""

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_json, read_regular

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, NAME.jinja."""
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE)

UNKNOWN = "for a character that the vocabulary lacks"
"""Unknown token of a BPE without one. It is in no vocabulary, and the library raises an exception that names it."""
MAX_GROWTH = 10_000
"""Limit of how many times longer the steps of one kind may make a text."""
MAX_STEPS = 1_000
"""Limit of the steps of one kind. Published tokenizers have less than twenty."""
MAX_PIECE = 10_000
"""Limit of the characters of a piece of a Unigram model. The library keeps them in a tree, and crashes when it frees a
deep one."""
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_FORM_GROWTH = 18
"""How many times longer a Unicode normal form makes a text at most."""
_DECODER = "added_tokens_decoder"
_SEPARATORS = ("bos_token", "eos_token")
_NOT_WRITTEN = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ALL_BYTES = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]))
"""A text with all bytes that occur in UTF-8."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    content: of tokenizer.json. config, special_tokens_map, ids: of tokenizer_config.json, special_tokens_map.json and
    added_tokens.json, {} if absent. templates: name -> text of the template files; chat_template.jinja, or the file
    that the configuration names in its place, is "default". chosen: the bos_token and eos_token of the configuration,
    in place of those of the files. lacks_characters: whether the vocabulary has no tokens for some characters, and no
    unknown token for them.
    """

    file: Path
    chosen: Mapping[str, str]
    content: bytes
    lacks_characters: bool
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    ids: Mapping[str, int]
    templates: Mapping[str, str]

    @property
    def names(self) -> dict[str, tuple[Any, str]]:
        """Name -> (token, file) of the special tokens that have a name, such as eos_token. A token is a text, a table
        with its content and flags, or None.

        transformers reads special_tokens_map.json only if tokenizer_config.json has no added_tokens_decoder.
        """
        files = [(TOKENIZER_CONFIG, self.config)]
        if _DECODER not in self.config:
            files.append((SPECIAL_TOKENS_MAP, self.special_tokens_map))
        found = {}
        for file, fields in files:
            extra = fields.get("extra_special_tokens")
            named = {key: value for key, value in fields.items() if key.endswith("_token")}
            for name, token in (named | (extra if isinstance(extra, dict) else {})).items():
                if token is None or text_of(token) is not None:
                    found[name] = (token, file)
                elif name in _SEPARATORS:
                    value = json.dumps(token)
                    raise self._error(file, f"{name} = {value}, which is not a text: fix or remove it")
        for name, text in self.chosen.items():
            if text_of(found.get(name, ("", ""))[0]) != text:
                found[name] = (text, f"tokenizer.{name.removesuffix('_token')}")
        return found

    @property
    def texts(self) -> dict[str, str]:
        """Name -> text of the special tokens with a name."""
        return {name: text for name, (token, _) in self.names.items() if (text := text_of(token)) is not None}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Name -> text. Files take the place of those in tokenizer_config.json. Raises UserError."""
        found = self.config.get("chat_template")
        if self.templates or not found:
            return dict(self.templates)
        templates: dict[str, Any] = {"default": found}
        if isinstance(found, list):
            templates = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
        for text in templates.values():
            if not isinstance(text, str):
                raise self._error(TOKENIZER_CONFIG, "a chat_template that is not a text: fix or remove it")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                fault = f"a chat_template with an unpaired surrogate at character {error.start}"
                raise self._error(TOKENIZER_CONFIG, fault) from None
        return templates

    def open(self) -> tuple[tokenizers.Tokenizer, dict[int, AddedToken]]:
        """The tokenizer of the `tokenizers` library with the added tokens of all files; and those of tokenizer.json
        alone, by id.

        transformers adds a token that the vocabulary lacks at its end. Those of _NOT_WRITTEN are not added there: no
        text has them, and a model may have no row for them. Raises UserError, and what the library raises.
        """
        library = _open(self.with_added() if self.lacks_characters else self.content)
        known = library.get_added_tokens_decoder()
        listed = dict(self._listed(known))
        had = {text for text in self._ids_by_text() if library.token_to_id(text) is not None}
        others = {token.content for token in listed.values()} | {text_of(token) for token, _, _ in self._extra()}
        for name, text in self.chosen.items():
            if text not in others and library.token_to_id(text) is None:
                raise UserError(f"tokenizer.{name.removesuffix('_token')} = {text!r} is not a token of the vocabulary")
        wanted = list(self._to_add(known, listed))
        while wanted and wanted[-1][1] in _NOT_WRITTEN and library.token_to_id(wanted[-1][0].content) is None:
            wanted.pop()
        library.add_tokens([token for token, _ in wanted])
        if not {token.content for token, _ in wanted}.isdisjoint(token.content for token in known.values()):
            # The library keeps a token that has become another kind among the special tokens, or outside of them.
            library = _open(self.with_added(library.get_added_tokens_decoder()))
        for text, (token_id, file, key) in self._ids_by_text().items():
            found = library.token_to_id(text)
            if text not in had and found != token_id:
                fault = f"{key} for {text!r} with the id {token_id}; transformers gives it "
                remedy = f"ids must follow those of {TOKENIZER_JSON} without gaps"
                raise self._error(file, f"{fault}{'none' if found is None else found}: {remedy}")
        return library, known

    def with_added(self, tokens: Mapping[int, AddedToken] | None = None) -> bytes:
        """tokenizer.json with these added tokens in place of its own, and an unknown token for an exception if
        characters have no tokens."""
        found = json.loads(self.content)  # not kept: it takes ten times the memory of the file
        if self.lacks_characters and "merges" in found["model"]:
            found["model"]["unk_token"] = UNKNOWN
        if tokens is not None:
            listed = sorted(tokens.items(), key=lambda item: item[0])
            found["added_tokens"] = [{"id": key, "content": one.content, **flags_of(one)} for key, one in listed]
        return json.dumps(found).encode()

    def _to_add(
        self, known: Mapping[int, AddedToken], listed: Mapping[int, AddedToken]
    ) -> Iterator[tuple[AddedToken, str]]:
        """The added tokens that tokenizer.json lacks or has with other flags, in the order of transformers, each with
        its name or "". known: those of tokenizer.json. listed: by id."""
        names = {name: token for name, (token, _) in self.names.items() if token is not None}
        texts = {token.content for token in known.values()}
        flags = {repr(token) for token in known.values()}
        named = {text_of(token) for token in names.values()}
        for _, token in sorted({**known, **listed}.items(), key=lambda item: item[0]):
            token = _with_flags(token, special=token.special or token.content in named)
            if repr(token) not in flags:
                texts.add(token.content)
                yield token, ""
        by_text = {token.content: token for token in listed.values()}
        for name in sorted(names, key=[*_SEPARATORS, *_NOT_WRITTEN, *names].index):
            token = self._token(names[name], self.names[name][1], name)
            if token.content not in texts:
                texts.add(token.content)
                yield _with_flags(by_text.get(token.content, token), special=True), name
        for value, file, key in self._extra():
            token = self._token(value, file, key)
            if token.content not in texts:
                texts.add(token.content)
                yield token, ""

    def _ids_by_text(self) -> dict[str, tuple[int, str, str]]:
        """Text -> (id, file, key) of the tokens that a file beside tokenizer.json adds with an id."""
        if _DECODER in self.config:
            listed = self._listed({})
            return {token.content: (token_id, TOKENIZER_CONFIG, _DECODER) for token_id, token in listed}
        return {text: (token_id, ADDED_TOKENS, "an entry") for text, token_id in self.ids.items()}

    def _listed(self, known: Mapping[int, AddedToken]) -> Iterator[tuple[int, AddedToken]]:
        """The tokens of added_tokens_decoder, by id; without it, those of added_tokens.json and `known`."""
        if _DECODER in self.config:
            decoder = self.config[_DECODER]
            for token_id, fields in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
                key = f"{_DECODER}.{token_id}"
                if not token_id.isdecimal() or not isinstance(fields, dict):
                    value = f"{key} = {json.dumps(fields)[:80]}"
                    raise self._error(TOKENIZER_CONFIG, f"{value}, which is not an id with a table: fix it")
                yield int(token_id), self._token({"special": False, "normalized": True} | fields, TOKENIZER_CONFIG, key)
            return
        standard = {text_of(self.names[name][0]) for name in (*_SEPARATORS, *_NOT_WRITTEN) if name in self.names}
        in_config = _list(self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens"))
        special = standard | {text_of(token) for token in in_config}
        for text, token_id in self.ids.items():
            yield token_id, self._token({"content": text, "special": text in special}, ADDED_TOKENS, text)
        yield from known.items()

    def _extra(self) -> Iterator[tuple[Any, str, str]]:
        """(token, file, key) of the special tokens without a name."""
        found: list[tuple[Any, str, str]] = []
        for key in ("extra_special_tokens", "additional_special_tokens"):
            if not found:
                found = [(token, TOKENIZER_CONFIG, key) for token in _list(self.config.get(key))]
            if _DECODER not in self.config and (not found or key == "extra_special_tokens"):
                found += [(token, SPECIAL_TOKENS_MAP, key) for token in _list(self.special_tokens_map.get(key))]
        yield from found

    def _token(self, value: Any, file: str, key: str) -> AddedToken:
        fields = value if isinstance(value, dict) else {"content": value}
        flags = {"special": True} | {name: fields[name] for name in _FLAGS if name in fields}
        text = fields.get("content")
        if not isinstance(text, str) or not text or any(not isinstance(flag, bool) for flag in flags.values()):
            raise self._error(file, f"{key} = {json.dumps(value)[:80]}, which is not a token: fix or remove it")
        flags.setdefault("normalized", not flags["special"])
        return AddedToken(text, **flags)

    def _error(self, file: str, fault: str) -> UserError:
        return UserError(f"{self.file.with_name(file)} has {fault}")


def read_tokenizer_files(file: Path, chosen: Mapping[str, str], chat_template: str) -> TokenizerFiles:
    """Read tokenizer.json, which is `file`, and all files beside it.

    chosen: BOS and EOS, see TokenizerFiles. chat_template: a file to use as the default template, or "". Raises
    UserError if a file beside it cannot be read, or contradicts it; OSError, ValueError and others for `file`.
    """
    content = read_regular(file)
    definition = json.loads(content)
    _require_bounded_growth(definition)
    _require_short_pieces(definition["model"])
    config = _read_beside(file, TOKENIZER_CONFIG)
    _check_config(config, definition, file.with_name(TOKENIZER_CONFIG))
    beside = file.with_name(CHAT_TEMPLATE)
    folder = file.with_name(TEMPLATES)
    files = {path.stem: str(path) for path in sorted(folder.glob("*.jinja"))} if folder.is_dir() else {}
    if chat_template or os.path.lexists(beside):
        files["default"] = chat_template or str(beside)
    return TokenizerFiles(
        file,
        {name: text for name, text in chosen.items() if text},
        content,
        _lacks_characters(definition),
        config,
        _read_beside(file, SPECIAL_TOKENS_MAP),
        _read_beside(file, ADDED_TOKENS, dict[str, int]),
        {name: read_chat_template(path) for name, path in files.items()},
    )


def _open(content: bytes) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    return library


def text_of(token: Any) -> str | None:
    """The text of a token of a tokenizer_config.json, which may be a table; None if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_chat_template(file: str) -> str:
    """The text of a chat template. Raises UserError if the file cannot be read or is not UTF-8."""
    try:
        return read_regular(Path(file)).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 at byte {error.start}: fix or remove it") from None
    except JsonError as error:
        raise UserError(f"{file} {error}: fix or remove it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json for a tokenizer.path, which is the file or its folder."""
    full = Path(path)
    return full / TOKENIZER_JSON if full.is_dir() else full


def _lacks_characters(definition: Mapping[str, Any]) -> bool:
    """Whether some texts have no tokens and no unknown token: a BPE drops them, other models raise an exception.
    definition: a tokenizer.json."""
    model = definition["model"]
    is_unigram, is_bpe = isinstance(model["vocab"], list), "merges" in model
    words = {word for word, _ in model["vocab"]} if is_unigram else model["vocab"].keys()
    if model.get("unk_id") is not None if is_unigram else model.get("unk_token") in words:
        return False
    needed: set[str] | None = None
    by_bytes = any(step["type"] == "ByteLevel" for step in _steps(definition, "normalizer", "pre_tokenizer"))
    if by_bytes and (is_bpe or is_unigram):
        needed = {*pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(_ALL_BYTES)[0][0]}
        prefix, suffix = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
        needed = {text for each in needed for text in (each, prefix + each, each + suffix, prefix + each + suffix)}
    elif is_bpe and model.get("byte_fallback"):
        needed = {f"<0x{byte:02X}>" for byte in _ALL_BYTES.encode()}
    return needed is None or not needed <= words


def _check_config(config: Mapping[str, Any], definition: Mapping[str, Any], file: Path) -> None:
    """Raise UserError if a tokenizer_config.json, `file`, contradicts the tokenizer.json."""
    for name in _list(config.get("fast_tokenizer_files")):
        if name != TOKENIZER_JSON:
            raise UserError(
                f"{file} has fast_tokenizer_files with {name!r}, which transformers may read in place of "
                f"{TOKENIZER_JSON}: remove the key, or rename this file"
            )
    adds_space = any(
        step["type"] == "Prepend"
        or (step["type"] == "ByteLevel" and step.get("add_prefix_space", True))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in _steps(definition, "normalizer", "pre_tokenizer")
    )
    given = config.get("add_prefix_space")
    if isinstance(given, bool) and given != adds_space:
        raise UserError(
            f"{file} has add_prefix_space = {str(given).lower()}, but {TOKENIZER_JSON} adds "
            f"{'one' if adds_space else 'none'}, and versions of transformers differ in which of them they follow: "
            f"remove add_prefix_space to use {TOKENIZER_JSON} as it is"
        )


def _steps(definition: Mapping[str, Any], *parts: str) -> Iterator[Mapping[str, Any]]:
    """The steps of these parts of a tokenizer.json in their order, also those of sequences."""
    waiting = [definition.get(part) for part in reversed(parts)]
    while waiting:
        step = waiting.pop()
        if step:
            yield step
            for key in ("normalizers", "pretokenizers", "processors", "decoders"):
                waiting += reversed(step.get(key, ()))


def _require_bounded_growth(definition: Mapping[str, Any]) -> None:
    """Raise ValueError if the steps before the model, those after it, or the decoder may make a text more than
    MAX_GROWTH times longer.

    Chained steps multiply: a small file could request any amount of memory. Also raised for more than MAX_STEPS.
    """
    for parts in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth, previous_is_form = 1, False
        named = " and ".join(part.replace("_", "-") for part in parts)
        for number, step in enumerate(_steps(definition, *parts), 1):
            if number > MAX_STEPS:
                raise ValueError(f"its {named} has more than {MAX_STEPS:,} steps: remove steps")
            kind = step.get("type", "")
            is_form = kind in _FORMS
            if not (is_form and previous_is_form):  # a form of a form is hardly longer
                growth *= _growth(step, kind)
            previous_is_form = is_form
            if growth > MAX_GROWTH:
                raise ValueError(f"its {named} may make a text more than {MAX_GROWTH:,} times longer: remove steps")


def _require_short_pieces(model: Mapping[str, Any]) -> None:
    """Raise ValueError if a Unigram model has a piece of more than MAX_PIECE characters."""
    if (
        isinstance(model["vocab"], list)
        and (longest := max((len(word) for word, _ in model["vocab"]), default=0)) > MAX_PIECE
    ):
        raise ValueError(f"a piece of its vocabulary has {longest:,} characters, more than {MAX_PIECE:,}")


def _growth(step: Mapping[str, Any], kind: str) -> int:
    """How many times longer one step may make a long text, or a token."""
    match kind:
        case "Replace":
            literal = step["pattern"].get("String")
            # A regular expression may match the empty string between all characters.
            return max(1, -(-len(step["content"]) // len(literal))) if literal else len(step["content"]) + 1
        case "Prepend":
            return max(1, len(step["prepend"]))
        case _ if kind in _FORMS:
            return _FORM_GROWTH
        case "Precompiled":
            return _longest_replacement(step["precompiled_charsmap"])
        case "ByteLevel":
            return 4  # a character for each byte
        case "BertNormalizer":
            return 3  # a space on both sides of a Chinese character
        case "Metaspace":
            return 2  # before each word, which may be a character
        case "BPEDecoder" if not step.get("suffix"):
            return 2
        case "CTC" if not step.get("word_delimiter_token"):
            return 2
        case "TemplateProcessing":
            return _template_growth(step)
    return 1


def _longest_replacement(table: str) -> int:
    """The bytes of the longest text in a table of SentencePiece: the size of its trie, the trie, texts that end with
    NUL. Raises ValueError if it is not one."""
    content = base64.b64decode(table)
    begin = 4 + int.from_bytes(content[:4], "little")
    if not 8 <= begin <= len(content):
        raise ValueError("its normalizer Precompiled has a damaged table")
    return max(1, *map(len, content[begin:].split(b"\0")))


def _template_growth(step: Mapping[str, Any]) -> int:
    """The copies of the text in a template, and the tokens that it adds to each."""
    texts = sum("Sequence" in piece for piece in step["single"])
    added = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    return max(1, texts) + sum(len(step["special_tokens"][name]["ids"]) for name in added)


def _read_beside(file: Path, name: str, schema: Any = dict[str, Any]) -> dict[str, Any]:
    """The JSON object in the file `name` beside `file`; {} if absent. Raises UserError."""
    path = file.with_name(name)
    if not os.path.lexists(path):
        return {}
    try:
        found: dict[str, Any] = read_json(path, schema)
    except JsonError as error:
        raise UserError(f"{path} {error}: fix or remove it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def flags_of(token: AddedToken) -> dict[str, bool]:
    """The flags of an added token, by their names in a tokenizer.json."""
    return {name: getattr(token, name) for name in _FLAGS}


def _with_flags(token: AddedToken, **flags: bool) -> AddedToken:
    return AddedToken(token.content, **flags_of(token) | flags)
