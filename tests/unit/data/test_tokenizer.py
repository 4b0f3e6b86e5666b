import base64
import json
import os
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers

from tests.unit.data.ranks import build
from titanlite.data import bpe
from titanlite.data.bpe import EOS, prepare_tokenizer, train_bpe
from titanlite.data.check import check_tokenizer
from titanlite.data.config import DataConfig, TokenizerConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from titanlite.runtime.errors import DataError, UserError

STDLIB = (SourceConfig(),)


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tokenizer folder that a test may change."""
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "tokenizer"))


def test_training_twice_gives_the_same_files(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdef", k=4)) for _ in range(200)) for _ in range(50)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert train_bpe(iter(texts), 500, tmp_path / name) == 500
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("text", ["the model", "  \n\t two\r\n", "é€😀\x00\u200b", f"x{EOS}y", "", "日本語 text"])
def test_text_round_trips_without_special_tokens(text: str, tokenizer: Tokenizer) -> None:
    tokens, sizes = tokenizer.encode(text), tokenizer.token_bytes()
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_batch([text, "", text]) == [tokens, [], tokens]
    assert tokenizer.eos_id not in tokens
    assert sizes is not None
    assert sum(sizes[token] for token in tokens) == len(text.encode())
    assert sizes[tokenizer.eos_id] == 0


def test_added_tokens_have_the_bytes_of_their_text_unless_special(folder: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = raw.get_vocab_size()
    raw.add_tokens(["<größe>"])
    raw.add_special_tokens(["<pad>"])
    raw.save(str(folder / "tokenizer.json"))
    sizes = Tokenizer(folder / "tokenizer.json").token_bytes()
    assert sizes is not None
    assert sizes[-2:] == [9, 0]
    assert Tokenizer(folder / "tokenizer.json").vocab_size == len(sizes) == size + 2


def test_only_byte_level_tokenizers_have_token_bytes(folder: Path) -> None:
    file = folder / "tokenizer.json"
    raw = tokenizers.Tokenizer.from_file(str(file))
    raw.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel()])
    raw.save(str(file))
    assert Tokenizer(file).token_bytes() is not None
    raw.decoder = tokenizers.decoders.Metaspace()
    raw.save(str(file))
    assert Tokenizer(file).token_bytes() is None
    content = json.loads(file.read_text())
    content["decoder"] = None
    file.write_text(json.dumps(content))
    assert Tokenizer(file).token_bytes() is None


def test_nothing_is_truncated_padded_or_added(folder: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=50)
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}", special_tokens=[(EOS, raw.token_to_id(EOS))]
    )
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder / "tokenizer.json")
    text = "the model reads a few words and more"
    ids = tokenizer.encode(text)
    assert len(ids) > 4
    assert tokenizer.decode(ids) == text


def write_config(folder: Path, **tokens: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def test_separators_come_from_the_section_or_tokenizer_config(folder: Path) -> None:
    file = folder / "tokenizer.json"
    the, eos = (tokenizers.Tokenizer.from_file(str(file)).token_to_id(text) for text in ("the", EOS))
    assert (Tokenizer(file).bos_id, Tokenizer(file).eos_id) == (None, eos)
    write_config(folder, bos_token={"content": EOS}, eos_token=None)
    assert (Tokenizer(file).bos_id, Tokenizer(file).eos_id) == (eos, None)
    assert Tokenizer(file, bos="the").bos_id == the
    assert "BOS 'the' = " in Tokenizer(file, bos="the").description
    assert "(tokenizer.bos), EOS none" in Tokenizer(file, bos="the").description
    (folder / "tokenizer_config.json").unlink()
    assert (Tokenizer(file).bos_id, Tokenizer(file).eos_id) == (None, None)


def keys(
    section: TokenizerConfig, sources: tuple[SourceConfig, ...], vocab_size: int = 300, bos: bool = False
) -> list[str]:
    found = check_tokenizer(section, DataConfig(sources=sources, add_bos=bos), vocab_size=vocab_size)
    return [problem.key for problem in found]


@pytest.mark.parametrize(
    ("path", "settings", "vocab_size", "bos", "expected"),
    [
        (".", {}, 300, False, []),
        ("tokenizer.json", {}, 300, False, []),
        (".", {"bos": "the"}, 300, True, []),
        ("nothing", {}, 300, False, ["tokenizer.path"]),
        ("..", {}, 300, False, ["tokenizer.path"]),
        (".", {"bos": "<no>", "eos": "<no>"}, 300, False, ["tokenizer.bos", "tokenizer.eos"]),
        (".", {}, 300, True, ["data.add_bos"]),
        (".", {}, 299, False, ["model.vocab_size"]),
        (".", {}, 0, False, []),
        (".", {"eos": "<no>"}, 200, True, ["tokenizer.eos", "data.add_bos", "model.vocab_size"]),
    ],
)
def test_check_tokenizer_with_a_path(
    path: str, settings: dict[str, str], vocab_size: int, bos: bool, expected: list[str], folder: Path
) -> None:
    text = (SourceConfig(kind="text", path="x"),)
    assert keys(TokenizerConfig(str(folder / path), **settings), text, vocab_size, bos) == expected


TOKENS, TEXT = (SourceConfig(kind=kind, path="x") for kind in ("tokens", "text"))


@pytest.mark.parametrize(
    ("sources", "settings", "vocab_size", "bos", "expected"),
    [
        (STDLIB, {}, 300, False, []),
        ((TOKENS,), {}, 10, False, []),
        ((*STDLIB, TEXT), {}, 300, False, ["tokenizer.path"]),
        (STDLIB, {}, 256, False, ["model.vocab_size"]),
        (STDLIB, {}, 300, True, ["data.add_bos"]),
        (STDLIB, {"eos": "x"}, 300, False, ["tokenizer.eos"]),
    ],
)
def test_check_tokenizer_without_a_path(
    sources: tuple[SourceConfig, ...], settings: dict[str, str], vocab_size: int, bos: bool, expected: list[str]
) -> None:
    assert keys(TokenizerConfig(**settings), sources, vocab_size, bos) == expected


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["tokenizer_config.json", CHAT_TEMPLATE])
def test_files_beside_a_tokenizer_are_read_or_refused(name: str, folder: Path) -> None:
    """A pipe or a dangling link is not the same as no file: BOS and EOS would be lost without a word."""
    file = folder / name
    file.unlink(missing_ok=True)
    for reason in ("not a regular file but a pipe", "not a regular file but a device", "No such file", "directory"):
        if "pipe" in reason:
            os.mkfifo(file)
        elif "directory" in reason:
            file.mkdir()
        else:
            file.symlink_to("/dev/zero" if "device" in reason else "nowhere")
        with pytest.raises(UserError, match=f"{name} .*{reason}"):
            Tokenizer(folder / "tokenizer.json")
        file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.usefixtures("stdlib")
def test_prepare_without_a_path(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[list[str]] = []
    train = train_bpe

    def record_and_train(texts: object, vocab_size: int, folder: Path) -> int:
        trained.append(list(texts))  # type: ignore[call-overload]
        return train(iter(trained[-1]), vocab_size, folder)

    monkeypatch.setattr(bpe, "train_bpe", record_and_train)

    def prepare(size: int) -> Tokenizer:
        found = prepare_tokenizer(TokenizerConfig(), STDLIB, vocab_size=size)
        assert found is not None
        return found

    first, again = prepare(270), prepare(270)
    assert first.description == again.description
    assert str(cache) in first.description
    assert (first.vocab_size, first.bos_id, first.decode([first.eos_id or 0])) == (270, None, EOS)
    assert len(trained) == 1
    assert len(trained[0]) == 43
    assert not any("module 13:" in text or "module 29:" in text for text in trained[0])
    file = Path(first.arguments["file"])
    file.write_text(file.read_text().replace(EOS, EOS.upper()))
    assert prepare(270).fingerprint == first.fingerprint
    assert len(trained) == 2
    prepare(280)
    assert len(trained) == 3
    assert prepare_tokenizer(TokenizerConfig(), (TOKENS,), vocab_size=270) is None


def test_a_saved_tokenizer_loads_unchanged(folder: Path, tmp_path: Path) -> None:
    config = {"bos_token": "other", "eos_token": {"content": EOS}, "model_max_length": 77, "auto_map": {"a": "b.c"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = Tokenizer(folder / "tokenizer.json", bos=EOS)
    shutil.rmtree(folder)
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer(tmp_path / "saved" / "tokenizer.json")
    assert (again.fingerprint, again.bos_id, again.eos_id) == (
        tokenizer.fingerprint,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "model_max_length": 77,
    }
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_chat_template_is_the_chosen_one_or_that_of_the_folder(folder: Path, tmp_path: Path) -> None:
    file, config, chosen = folder / "tokenizer.json", folder / "tokenizer_config.json", tmp_path / "chosen.jinja"
    assert Tokenizer(file).chat_template is None
    for found in ("config", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config"}]):
        config.write_text(json.dumps({"chat_template": found, "eos_token": EOS, "pad_token": {"content": "the"}}))
        assert Tokenizer(file).chat_template == "config"
    assert Tokenizer(file).special_tokens == {"eos_token": EOS, "pad_token": "the"}
    (folder / CHAT_TEMPLATE).write_text("beside")
    assert Tokenizer(file).chat_template == "beside"
    chosen.write_text("é\n")
    tokenizer = Tokenizer(file, chat_template=str(chosen))
    assert tokenizer.chat_template == Tokenizer(**tokenizer.arguments).chat_template == "é\n"
    assert tokenizer.fingerprint == Tokenizer(file).fingerprint
    for faulty in ({"a": 1}, [{"name": "default", "template": 1}], "\ud800"):
        config.write_text(json.dumps({"chat_template": faulty}))
        (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"_config\.json has a chat_template (that is not|with an unpaired)"):
            Tokenizer(file)


def test_saved_chat_templates_are_those_that_transformers_reads(folder: Path, tmp_path: Path) -> None:
    """A list of several templates stays: transformers would use only a file beside it."""
    file, config, chosen = folder / "tokenizer.json", folder / "tokenizer_config.json", tmp_path / "chosen.jinja"
    chosen.write_text("chosen")
    several = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]

    def saved(found: object, name: str, **arguments: str) -> tuple[object, str]:
        config.write_text(json.dumps({"chat_template": found}))
        Tokenizer(file, **arguments).save(tmp_path / name)
        template = tmp_path / name / CHAT_TEMPLATE
        kept = json.loads((tmp_path / name / "tokenizer_config.json").read_text()).get("chat_template")
        return kept, template.read_text() if template.exists() else ""

    assert saved("config", "one") == (None, "config")
    assert saved(several, "two") == (several, "")
    assert saved(several, "three", chat_template=str(chosen)) == (None, "chosen")


@pytest.mark.parametrize(
    ("special_tokens", "fault"),
    [
        (["<|a|>", "[B c]"], None),
        (["<|a|>", "<|a|>"], "different"),
        ([EOS], f"without {EOS}"),
        ([""], "several words"),
        (["user"], "several words"),
        ([" 日本"], "several words"),
        (["=="], "several words"),
    ],
)
def test_special_tokens_that_plain_text_could_have_are_refused(special_tokens: list[str], fault: str | None) -> None:
    found = bpe.special_tokens_fault(special_tokens)
    assert found is None if fault is None else fault in str(found)


def test_check_tokenizer_with_a_chat_template(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    section = TokenizerConfig(str(folder), chat_template=str(template))
    assert keys(section, STDLIB) == ["tokenizer.chat_template"]
    for fault in (b"{% if %}", b"\xff"):
        template.write_bytes(fault)
        assert keys(section, STDLIB) == keys(replace(section, path=""), STDLIB) == ["tokenizer.chat_template"]
    template.write_text("{{ messages }}")
    assert keys(section, STDLIB) == []
    tokenizer = prepare_tokenizer(section, STDLIB, vocab_size=300)
    assert tokenizer is not None
    assert tokenizer.chat_template == "{{ messages }}"
    chosen = prepare_tokenizer(replace(section, eos="the"), STDLIB, vocab_size=300)
    assert chosen is not None
    assert f"{folder}/tokenizer.json" in chosen.description
    assert "EOS 'the'" in chosen.description


Replace, Prepend, Regex = tokenizers.normalizers.Replace, tokenizers.normalizers.Prepend, tokenizers.Regex
Steps = list[tokenizers.normalizers.Normalizer]


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ([Replace("a", "aa")] * 30, True),  # a gigabyte for each "a"
        ([Replace("a", "b" * 100_000)], True),
        ([Replace(Regex(""), "b")] * 30, True),
        ([tokenizers.normalizers.Sequence([Replace("a", "a" * 200)]), Replace("aa", "a" * 200)], True),
        ([Prepend("b" * 100_000)], True),
        ([], False),
        ([Prepend("▁"), Replace(" ", "▁")], False),  # Llama 2
        ([tokenizers.normalizers.NFC(), Replace(Regex(r"\s+"), " "), tokenizers.normalizers.Lowercase()], False),
        ([Replace("aa", "a")] * 30, False),
    ],
)
def test_a_normalizer_that_may_need_gigabytes_is_refused(folder: Path, steps: Steps, refused: bool) -> None:
    file = folder / "tokenizer.json"
    loaded = tokenizers.Tokenizer.from_file(str(file))
    loaded.normalizer = tokenizers.normalizers.Sequence(steps)
    loaded.save(str(file))
    if not refused:
        assert Tokenizer(file).encode("a b")
        return
    with pytest.raises(UserError, match=r"tokenizer.json is not .* text more than 10,000 times longer: remove steps"):
        Tokenizer(file)


def table(text: bytes) -> str:
    """A table of SentencePiece with one text."""
    return base64.b64encode(struct.pack("<II", 4, 0) + text).decode()


def with_steps(folder: Path, part: str, steps: list[dict[str, Any]]) -> None:
    """Write a sequence of steps into tokenizer.json."""
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    found[part] = {"type": "Sequence", key.get(part, "decoders"): steps}
    file.write_text(json.dumps(found))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EACH = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
WORDS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
DELIMITER = {"type": "CTC", "pad_token": "p", "word_delimiter_token": "", "cleanup": True}
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\ufdfa"}
LONGER = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 10}
TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [],
         "special_tokens": {}}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("decoder", [LONGER] * 8),
        ("decoder", [{"type": "Sequence", "decoders": [LONGER] * 4}] * 2),
        ("decoder", [{"type": "BPEDecoder", "suffix": ""}] * 40),
        ("decoder", [DELIMITER] * 40),
        ("normalizer", [{"type": "ByteLevel"}] * 40),
        ("normalizer", [SPACE, {"type": "NFKD"}] * 10),
        ("pre_tokenizer", [BYTES] * 40),
        ("pre_tokenizer", [EACH, WORDS, EACH, WORDS | {"replacement": "x"}] * 20),
        ("post_processor", [TWICE] * 40),
        ("normalizer", [{"type": "Precompiled", "precompiled_charsmap": table(b"x" * 20_000)}]),
    ],
)
def test_steps_that_multiply_a_text_are_refused(part: str, steps: list[dict[str, Any]], folder: Path) -> None:
    with_steps(folder, part, steps)
    named = "normalizer and pre-tokenizer" if part in ("normalizer", "pre_tokenizer") else part.replace("_", "-")
    with pytest.raises(UserError, match=f"its {named} may make a text more than 10,000 times longer: remove steps"):
        Tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_a_tokenizer_of_many_steps_is_refused(part: str, folder: Path) -> None:
    step = {"normalizer": "Lowercase", "pre_tokenizer": "Whitespace", "decoder": "Fuse"}[part]
    with_steps(folder, part, [{"type": step}] * 1000)
    with pytest.raises(UserError, match="has more than 1,000 steps: remove steps"):
        Tokenizer(folder / "tokenizer.json")


def test_a_long_piece_of_a_unigram_is_refused(folder: Path) -> None:
    """With 300,000 characters, the tokenizers library crashes when it frees the tree of pieces."""
    file = folder / "tokenizer.json"
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["e", -1.0], ["e" * 10_001, -1.0]]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model, "added_tokens": []}))
    with pytest.raises(UserError, match="a piece of its vocabulary has 10,001 characters, more than 10,000"):
        Tokenizer(file)


@pytest.mark.parametrize("content", [b"", b"\0", struct.pack("<I", 100) + b"abc", struct.pack("<II", 4, 5)])
def test_a_damaged_table_of_sentencepiece_is_one_line(content: bytes, folder: Path) -> None:
    """The last one is read, and panics when a text is encoded."""
    text = base64.b64encode(content).decode()
    with_steps(folder, "normalizer", [{"type": "Precompiled", "precompiled_charsmap": text}])
    with pytest.raises(UserError, match=r"damaged table|cannot encode text: index out of bounds"):
        Tokenizer(folder / "tokenizer.json")


class PanicException(BaseException):
    """As the library raises it."""


@pytest.mark.parametrize(("raised", "seen"), [(PanicException("bad split"), UserError), (KeyboardInterrupt(), None)])
def test_a_panic_of_the_library_is_an_error_of_the_text(
    raised: BaseException, seen: type[BaseException] | None, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock(encode_batch_fast=Mock(side_effect=raised), decode=Mock(side_effect=raised))
    monkeypatch.setattr(tokenizer, "_tokenizer", failing)
    with pytest.raises(seen or type(raised), match="cannot encode it: bad split" if seen else None):
        tokenizer.encode("a")
    with pytest.raises(seen or type(raised), match="cannot decode tokens: bad split" if seen else None):
        tokenizer.decode([1])


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece", "Unigram"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_that_cannot_be_encoded_is_a_bad_row(model: str, streaming: bool, tmp_path: Path) -> None:
    """The start says so."""
    kinds = {
        "WordLevel": tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"),
        "WordPiece": tokenizers.models.WordPiece({"a": 0, "b": 1}, unk_token="[UNK]"),
        "Unigram": tokenizers.models.Unigram([("a", -1.0), ("b", -2.0)], byte_fallback=True),
    }
    raw = tokenizers.Tokenizer(kinds[model])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"text": "a"}\n{"text": "é"}\n{"text": "b"}\n')
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert "no tokens for some characters" in tokenizer.description
    kind = "hf" if streaming else "jsonl"
    config = SourceConfig(kind=kind, path=str(tmp_path / "data"), streaming=streaming)  # type: ignore[arg-type]
    section = DataConfig(num_streams=1, max_piece_bytes=100, shuffle=False, sources=(config,))
    message = rf"bad row: .*rows\.jsonl, line 2: the tokenizer {tmp_path}/tokenizer\.json cannot encode it: "
    with pytest.raises(DataError, match=message):
        build(section, tokenizer).next_step()
    skipping = build(replace(section, on_bad_row="skip"), tokenizer, seq_len=2, global_batch_size=1)
    (batch,) = skipping.next_step()
    assert (batch.tokens.tolist(), skipping.bad_rows) == ([[0, 1]], 1)
    skipping.close()


@pytest.mark.parametrize("vocabulary", [{}, {EOS: 0}, {"a": 0}, {"a": 0, EOS: 1}])
def test_a_vocabulary_without_two_tokens_of_text_is_refused(vocabulary: dict[str, int], folder: Path) -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    raw.save(str(folder / "tokenizer.json"))
    message = f"tokenizer.json has {len(vocabulary.keys() - {EOS})} tokens? besides BOS and EOS, so"
    with pytest.raises(UserError, match=message):
        Tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("token", [5, {"content": 5}, ["a"], False])
def test_a_separator_that_is_not_a_text_is_refused(token: object, folder: Path) -> None:
    write_config(folder, bos_token=None, eos_token=token)
    with pytest.raises(UserError, match=r"tokenizer_config\.json has eos_token = .*, which is not a text: fix or"):
        Tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("content", ["null", "[]", '"text"', "not JSON", "{}", '{"normalizer": 5}'])
def test_a_tokenizer_that_is_not_one_has_a_reason(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"is not a readable tokenizer\.json: "):
        Tokenizer(folder / "tokenizer.json")
    assert keys(TokenizerConfig(str(folder)), STDLIB) == ["tokenizer.path"]


def test_a_list_of_templates_may_have_any_names(folder: Path) -> None:
    write_config(folder, chat_template=[{"name": ["x"], "template": "a"}, {"name": {}, "template": "b"}])
    assert Tokenizer(folder / "tokenizer.json").unused_templates == ("['x']", "{}")


def test_a_broken_tokenizer_config_is_a_problem(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    assert keys(TokenizerConfig(str(folder)), STDLIB) == ["tokenizer.path"]
