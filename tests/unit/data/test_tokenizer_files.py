"""Tokens, names and templates of all files of a tokenizer's folder, compared with transformers.AutoTokenizer."""

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from titanlite.data.bpe import train_bpe
from titanlite.data.chat.encoder import ChatEncoder, EncodedChat
from titanlite.data.chat.messages import Conversation
from titanlite.data.check import check_tokenizer
from titanlite.data.config import DataConfig, TokenizerConfig
from titanlite.data.corpus import Encoder, TokenPiece
from titanlite.data.sources.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, PieceText
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES
from titanlite.runtime.errors import UserError

SIZE = 376
TEXTS = ["hello world", "a <think> b <|pad|>", "naïve 日本\n", " "]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
)
START, END, PAD, TWO = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|two|>"


def table(text: str, **flags: bool) -> dict[str, Any]:
    """A token as transformers writes it."""
    names = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": text, **dict.fromkeys(names, False), "special": True} | flags


def named(text: str) -> dict[str, Any]:
    return table(text) | {"__type": "AddedToken"}


def decoder(**tokens: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {key.removeprefix("id"): token for key, token in tokens.items()}}


CHAT = decoder(id376=table(START), id377=table(END))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer.json of a byte-level BPE of 376 tokens; <|endoftext|> is one of them."""
    folder = tmp_path_factory.mktemp("trained")
    words = [f"{a}{b}{c} hello world user assistant" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuv"]
    assert train_bpe(iter(words), SIZE, folder, ["<|one|>", TWO]) == SIZE
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][2]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copy(trained, tmp_path)
    return tmp_path


def write(folder: Path, config: dict[str, Any] | None, special: Any = None, added: Any = None) -> Path:
    """Write the files beside tokenizer.json; return its path."""
    if config is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    for name, content in zip(TOKENIZER_FILES[1:4], (config, special, added), strict=True):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder / "tokenizer.json"


def judge(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def require_equal(tokenizer: Tokenizer, folder: Path, *, without: str = "") -> None:
    """Ids, flags, names, BOS, EOS and decoding are those of AutoTokenizer. without: a token that only it has."""
    theirs = judge(folder)
    ours = Library.from_buffer(tokenizer.content).get_added_tokens_decoder()
    expected = {key: repr(token) for key, token in theirs.added_tokens_decoder.items() if token.content != without}
    assert {key: repr(token) for key, token in ours.items()} == expected
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert tokenizer.special_tokens == theirs.special_tokens_map
    assert tokenizer.vocab_size == len(theirs) - bool(without)
    special = [token.content for token in ours.values() if token.special]
    for text in [*TEXTS, *(token.content for token in ours.values() if not token.special)]:
        if not any(token in text for token in [*special, without] if token):
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == theirs.decode(ids)
    for text in special:
        assert tokenizer.decode([theirs.convert_tokens_to_ids(text)]) == text
        assert theirs.convert_tokens_to_ids(text) not in tokenizer.encode(f"a {text} b"), "a user's text stays text"


CASES: dict[str, tuple[Any, ...]] = {
    "no other file": (None,),
    "decoder": (CHAT | {"eos_token": END},),
    "decoder, not special": (decoder(id376=table("<think>", special=False, normalized=True)),),
    "decoder, not special but named": (decoder(id376=table(END, special=False)) | {"eos_token": END},),
    "decoder, in another order": (decoder(id377=table(END), id376=table(START)) | {"eos_token": named(START)},),
    "decoder wins": (CHAT, {"eos_token": START}, {PAD: 378}),
    "another flag": (decoder(id0=table("<|endoftext|>", special=False)),),
    "added_tokens.json": ({}, None, {START: 376, "<think>": 377}),
    "added_tokens.json alone": (None, None, {END: 377, START: 376}),
    "added and named": ({"eos_token": END}, {"bos_token": START}, {END: 377, START: 376}),
    "added and extra": ({"additional_special_tokens": [START]}, None, {START: 376, "<think>": 377}),
    "map, a text": ({}, {"eos_token": "<|endoftext|>"}),
    "map, a table": ({"eos_token": START}, {"eos_token": table(END, lstrip=True)}),
    "map, texts": ({}, {"additional_special_tokens": [START, END], "pad_token": PAD}),
    "map, extra": ({"extra_special_tokens": [START]}, {"extra_special_tokens": [END, START]}),
    "map alone": (None, {"eos_token": END, "bos_token": "<|endoftext|>"}),
    "config, tables": ({"additional_special_tokens": [named(START), named(END)], "eos_token": named(END)},),
    "config, more names": ({"image_token": "<image>", "extra_special_tokens": {"video_token": "<video>"}},),
    "EOS in no file": ({"eos_token": END},),
    "EOS that is not special": ({"eos_token": TWO}, {"bos_token": TWO}),
    "EOS that is not special, decoder": (decoder(id2=table(TWO, special=False)) | {"eos_token": TWO},),
    "EOS is a word": ({"eos_token": "user", "pad_token": "user"},),
    "BOS and EOS are null": ({"bos_token": None, "eos_token": None}, {"eos_token": None}),
    "the same prefix space": ({"add_prefix_space": False},),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers_also_after_a_copy(case: str, folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(folder, *CASES[case]))
    require_equal(tokenizer, folder)
    if tokenizer.vocab_size == SIZE and not re.search("flag|not special", case):  # as in earlier versions, to resume
        ids = json.dumps([tokenizer.bos_id, tokenizer.eos_id]).encode()
        content = sha256((folder / "tokenizer.json").read_bytes()).digest()
        assert tokenizer.fingerprint == sha256(content + ids).hexdigest()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in TOKENIZER_FILES:
        (copy / name).write_text("of another tokenizer")
    (copy / TEMPLATES).mkdir()
    (copy / TEMPLATES / "other.jinja").touch()
    tokenizer.save(copy)
    again = Tokenizer(copy / "tokenizer.json")
    require_equal(again, copy)
    assert again.chat_template == judge(copy).chat_template is None
    assert again.fingerprint == tokenizer.fingerprint
    assert again.chat_tokens == tokenizer.chat_tokens


def test_fingerprints_have_the_tokens_of_the_other_files(folder: Path) -> None:
    """Those that only conversations have are in the fingerprint of the chat template alone."""
    configs = ({}, CHAT, decoder(id376=table(END), id377=table(START)), decoder(id0=table("<|one|>", special=False)))
    found = [Tokenizer(write(folder, config)).fingerprint for config in configs]
    assert len({*found}) == len(configs)
    tokenizers = [
        Tokenizer(write(folder, config | {"chat_template": CHATML}))
        for config in ({}, decoder(id1=table("<|one|>", lstrip=True)))
    ]
    assert {one.fingerprint for one in tokenizers} == {found[0]}
    assert len({ChatEncoder(one).fingerprint for one in tokenizers}) == 2


def test_no_document_has_an_eos_that_the_decoder_lacks(folder: Path) -> None:
    """transformers leaves it as it is in tokenizer.json: not special."""
    tokenizer = Tokenizer(write(folder, decoder(id0=table("<|endoftext|>")) | {"eos_token": TWO}))
    assert tokenizer.eos_id is not None
    assert tokenizer.eos_id not in tokenizer.encode(f"a {TWO} b")


def test_a_token_that_no_text_has_is_not_added_at_the_end(folder: Path) -> None:
    """A model has no row for it, and a run that was saved before would be refused."""
    before = Tokenizer(write(folder, {}))
    tokenizer = Tokenizer(write(folder, {"pad_token": PAD}))
    assert (tokenizer.fingerprint, tokenizer.vocab_size) == (before.fingerprint, SIZE)
    assert tokenizer.special_tokens == {"pad_token": PAD}


@pytest.mark.parametrize(
    ("config", "special", "added", "message"),
    [
        (decoder(id380=table(END)), None, None, "added_tokens_decoder for .* with the id 380; .* gives it 376"),
        (decoder(id5=table(END)), None, None, r"_config\.json has added_tokens_decoder for .* id 5; .* 376: ids must"),
        ({}, None, {END: 376, START: 378}, r"added_tokens\.json has an entry for .* id 378; transformers gives it 377"),
        ({}, None, {END: 0}, r"added_tokens\.json has an entry for .* id 0; transformers gives it none"),
        ({}, None, {END: "376"}, r"added_tokens\.json is invalid"),
        ({"added_tokens_decoder": {"x": table(END)}}, None, None, r"added_tokens_decoder\.x = .* not an id with"),
        ({"added_tokens_decoder": [END]}, None, None, r"added_tokens_decoder\. = .* not an id with a table"),
        (decoder(id376={"content": 1}), None, None, r"added_tokens_decoder\.376 = .*, which is not a token"),
        ({"eos_token": [END]}, None, None, r"_config\.json has eos_token = .*, which is not a text"),
        ({}, {"eos_token": 1}, None, r"special_tokens_map\.json has eos_token = 1, which is not a text"),
        ({"extra_special_tokens": [1]}, None, None, "extra_special_tokens = 1, which is not a token"),
        ({"add_prefix_space": True}, None, None, r"add_prefix_space = true, but tokenizer\.json adds none"),
        ({"fast_tokenizer_files": ["tokenizer.4.json"]}, None, None, r"fast_tokenizer_files with 'tokenizer\.4\.json'"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    folder: Path, config: dict[str, Any], special: Any, added: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer(write(folder, config, special, added))


def test_an_added_id_beyond_the_model_is_refused(folder: Path) -> None:
    """A chosen EOS takes the place of one that the files add."""
    for config, eos, size in ((CHAT, "", 378), ({"eos_token": END}, "", 377), ({"eos_token": END}, "user", None)):
        write(folder, config)
        found = check_tokenizer(TokenizerConfig(str(folder), eos=eos), DataConfig(), vocab_size=SIZE)
        rules = [(problem.key, problem.rule.partition(",")[0]) for problem in found]
        assert rules == ([("model.vocab_size", f"at least {size}")] if size else [])
    assert "378 tokens (2 of the files beside it), BOS none" in Tokenizer(write(folder, CHAT)).description


@pytest.mark.parametrize(
    ("step", "adds"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), True),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]), False),
        (pre_tokenizers.Metaspace(prepend_scheme="first"), True),
        (pre_tokenizers.Metaspace(prepend_scheme="never"), False),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), True),
        (normalizers.NFC(), False),
    ],
)
def test_a_prefix_space_is_that_of_tokenizer_json(folder: Path, step: Any, adds: bool) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    part = "normalizer" if isinstance(step, normalizers.Normalizer) else "pre_tokenizer"
    setattr(library, part, step)
    library.save(str(folder / "tokenizer.json"))
    Tokenizer(write(folder, {"add_prefix_space": adds}))
    with pytest.raises(UserError, match="add_prefix_space"):
        Tokenizer(write(folder, {"add_prefix_space": not adds}))


def test_conversations_have_the_tokens_of_the_other_files(folder: Path) -> None:
    file = write(folder, CHAT | {"eos_token": END, "chat_template": CHATML})
    tokenizer = Tokenizer(file)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    (found,) = ChatEncoder(tokenizer).encode([Conversation(messages)], "all")
    assert isinstance(found, EncodedChat)
    assert (found.tokens[0], *found.tokens[-2:], tokenizer.eos_id) == (376, 377, 201, 377)
    assert found.tokens.tolist() == judge(folder).apply_chat_template(messages)["input_ids"]
    (found,) = ChatEncoder(tokenizer).encode(
        [Conversation([messages[0], messages[1] | {"content": f"a {END}"}])], "all"
    )
    assert isinstance(found, EncodedChat)
    assert found.tokens.tolist().count(377) == 2, "a user's text stays text"


def test_further_templates_are_kept(folder: Path, tmp_path: Path) -> None:
    (folder / TEMPLATES).mkdir()
    (folder / TEMPLATES / "tools.jinja").write_text("tools")
    file = write(folder, {"chat_template": "of the config"})
    assert (Tokenizer(file).chat_template, Tokenizer(file).unused_templates) == (None, ("tools",))
    assert judge(folder).chat_template == {"tools": "tools"}
    (folder / "chat_template.jinja").write_text("default")
    Tokenizer(file).save(tmp_path / "copy")
    assert Tokenizer(tmp_path / "copy" / "tokenizer.json").chat_template == "default"
    assert judge(tmp_path / "copy").chat_template == {"default": "default", "tools": "tools"}


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
IN_UTF8 = sorted({*ALPHABET} - {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))})
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize(
    ("words", "kind", "drops"),
    [
        (["a", "b", " "], "", True),
        (["a", *BYTES[:1], *BYTES[2:]], "byte_fallback", True),
        (["a", *BYTES], "byte_fallback", False),
        (ALPHABET, "byte_level", False),
        (ALPHABET[:-100], "byte_level", True),
        (IN_UTF8, "byte_level", False),
        (ALPHABET, "byte_level</w>", True),
    ],
)
def test_a_text_that_would_be_lost_is_refused(folder: Path, words: list[str], kind: str, drops: bool) -> None:
    """The library drops characters without tokens, and words of which it has none."""
    ids = {word: index for index, word in enumerate([*words, START, END])}
    library = Library(models.BPE(ids, [], byte_fallback=kind == "byte_fallback"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if kind == "byte_level</w>":
        library = Library(models.BPE(ids, [], end_of_word_suffix="</w>"))
    if kind.startswith("byte_level"):
        library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    library.add_special_tokens([START, END])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(write(folder, {"chat_template": "{{ messages[0].content }}"}))
    assert ("no tokens for some characters" in tokenizer.description) == drops
    faults = []
    for text in ("a", "\x01", "日本", "aña", "ñ a", "a\u0100"):
        (of_chat,) = ChatEncoder(tokenizer).encode([Conversation([{"role": "user", "content": text}])], "all")
        ids_of_text = library.encode(text, add_special_tokens=False).ids
        if library.decode(ids_of_text) == text:
            assert tokenizer.encode(text) == ids_of_text
            assert isinstance(of_chat, EncodedChat)
            continue
        with pytest.raises(UserError, match=r"cannot encode it: .*for a character that the vocabulary lacks"):
            tokenizer.encode(text)
        faults.append(str(of_chat))
    assert bool(faults) == drops
    assert all("for a character that the vocabulary lacks" in fault for fault in faults)


def test_lost_text_is_a_bad_row_of_its_own(folder: Path) -> None:
    """The others of the batch have their tokens; only the tokens before a text are as before."""
    library = Library(models.BPE({"a": 0, "b": 1, "e": 2}, []))
    library.post_processor = processors.TemplateProcessing(single="e $A", special_tokens=[("e", 2)])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder / "tokenizer.json", eos="e")
    pieces = [PieceText(STARTS_DOCUMENT | ENDS_DOCUMENT, text, lambda: iter(())) for text in ("ab", "a日", "b")]
    first, bad, last = Encoder(tokenizer, add_bos=False, add_eos=True).encode(pieces, lambda n: f"row {n}")
    assert isinstance(first, TokenPiece)
    assert isinstance(last, TokenPiece)
    assert (first.tokens.tolist(), last.tokens.tolist()) == ([0, 1, 2], [1, 2])
    assert isinstance(bad, BadRowError)
    assert str(bad).startswith("row 1: the tokenizer ")
    assert tokenizer.prefix_ids == (2,)
