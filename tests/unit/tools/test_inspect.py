"""The output of the inspect command for small corpora with known statistics."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import titanlite
from tests.unit.data.conversations import TEMPLATE, write_conversations
from tests.unit.data.ranks import build
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError
from titanlite.tools import inspect
from titanlite.tools.tokenize import __main__ as tokenize

ROWS = [f"the model reads {n} words\n" * (1 + n % 5) for n in range(40)]


@pytest.fixture
def config(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_folder: Path) -> Path:
    """40 documents of one to five pieces and two bad rows; sequences of 16 tokens, two per step."""
    rows = write_jsonl([*ROWS, b"{", b"[]"])
    file = tmp_path / "config.toml"
    file.write_text(
        "[model]\nvocab_size = 300\n[training]\nseq_len = 16\nglobal_batch_size = 2\nlocal_batch_size = 2\n"
        f'[tokenizer]\npath = "{tokenizer_folder}"\n[data]\nmax_piece_bytes = 60\non_bad_row = "skip"\n'
        f'[[data.sources]]\nkind = "jsonl"\nname = "rows"\npath = "{rows}"\n'
    )
    return file


def printed(capsys: pytest.CaptureFixture[str], config: Path, *arguments: str) -> str:
    inspect.main([str(config), *arguments])
    return capsys.readouterr().out


def number(text: str, before: str) -> float:
    """The number after `before`."""
    found = re.search(rf"{before}\D*?([\d,]+(\.\d+)?)", text)
    assert found, text
    return float(found[1].replace(",", ""))


def test_statistics(config: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [len(tokenizer.encode(row)) + 1 for row in ROWS]  # every cut is between two lines, and splits no token
    text = printed(capsys, config, "--sequences", "0")
    assert "documents     42; all read" in text  # including two bad rows, which are counted before they are read
    assert number(text, "tokens  ") == sum(lengths)
    assert number(text, "mean") == pytest.approx(np.mean(lengths), abs=0.05)
    assert number(text, "longest") == max(lengths)
    assert number(text, "50 %:") == pytest.approx(np.median(lengths), abs=0.5)
    assert "bad rows      2 of" in text
    assert "line 41: invalid JSON" in text
    assert "line 42: not a JSON object" in text
    assert number(text, "an epoch") == round(sum(lengths) / 16)
    assert re.search(
        r"packing       concatenate: \d\.\d\d% padding, .*\n +best_fit: .*% of the documents cut\n +none: ", text
    )
    assert "sequence 0" not in text


def test_a_sample_is_marked_and_about_right(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = printed(capsys, config, "--sequences", "0")
    monkeypatch.setattr(inspect, "SAMPLED_DOCUMENTS", 15)
    sample = printed(capsys, config, "--sequences", "0")
    assert "documents     42; 15 of them, drawn at random, were read" in sample
    assert number(sample, "tokens  ") == pytest.approx(number(complete, "tokens  "), rel=0.2)
    assert "tokens        about " in sample
    assert printed(capsys, config, "--sequences", "0", "--all") == complete


def training_batches(section: DataConfig, tokenizer: Tokenizer, steps: int) -> list[Batch]:
    """The batches of the first steps, of one sequence each."""
    loader = build(section, tokenizer, global_batch_size=2)
    batches = [batch for _ in range(steps) for batch in loader.next_step()]
    loader.close()
    return batches


def blocks(text: str) -> list[list[tuple[str, str]]]:
    """The parts of each printed sequence: (heading, text)."""
    sequences = text.split("\n════ ")[1:]
    pattern = re.compile(r"^──── (.*?) ────\n(.*?)(?=\n──── |\n?\Z)", re.DOTALL | re.MULTILINE)
    return [pattern.findall(sequence) for sequence in sequences]


def test_what_is_trained_on_in_conversations_is_marked(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    write_conversations(tmp_path / "chat.jsonl", [2, 200, 1])
    chat = ("--data.sources.0.kind", "chat", "--data.sources.0.path", str(tmp_path / "chat.jsonl"))
    template = ("--tokenizer.chat_template", str(tmp_path / "template.jinja"), "--data.shuffle", "false")
    text = printed(capsys, config, *chat, *template, "--training.seq_len", "100", "--sequences", "1")
    assert "conversations 3; all read" in text
    assert "too long      1 of those read, 33.3%, have more than training.seq_len + 1 = 101 tokens" in text
    assert "left out      0 of those read" in text
    assert number(text, "an epoch") == 3
    assert re.search(r"best_fit: [\d.]+% padding\n", text)
    first, second, _ = blocks(text)[0]  # and the padding
    assert first[0].startswith("conversation: rows, tokens 0 to ")
    assert first[1] == "user: question 0\nassistant:⟦ word word .⟧\n"
    assert second[1] == "user: question 2\nassistant:⟦ word .⟧\n"


@pytest.mark.parametrize("mask", ["true", "false"])
def test_the_sequences_are_those_of_training(
    mask: str, config: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, config, "--sequences", "12", "--data.document_mask", mask)
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "rows.jsonl"))
    section = DataConfig(
        num_streams=2, max_piece_bytes=60, document_mask=mask == "true", on_bad_row="skip", sources=(source,)
    )
    expected = [
        (batch.tokens[0].tolist(), batch.labels[0].tolist()) for batch in training_batches(section, tokenizer, 6)
    ]
    found = blocks(text)
    assert len(found) == 12
    boundaries = 0
    for (tokens, labels), parts in zip(expected, found, strict=True):
        assert "".join(part for _, part in parts) == tokenizer.decode(tokens)
        for rule, part in parts:
            begin, end = map(int, re.search(r"tokens (\d+) to (\d+)", rule).groups())  # type: ignore[union-attr]
            assert part == tokenizer.decode(tokens[begin : end + 1])
            masked = [place for place in range(begin, end + 1) if labels[place] == IGNORE_INDEX]
            tail = f", masked labels at {', '.join(map(str, masked))}" if masked else ""
            assert rule.endswith(f": rows, tokens {begin} to {end}{tail}")
            assert begin == 0 or rule.startswith("document: rows, ")
            boundaries += begin > 0
    assert boundaries > 5
    assert any(rule.startswith("document, continued: rows, ") for (rule, _), *_ in found)
    assert any(rule.startswith("part of a document: rows, ") for (rule, _), *_ in found)


def test_padding_is_marked(config: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, config, "--sequences", "8", "--data.packing", "none", "--data.max_piece_bytes", "1000")
    padded = [parts for parts in blocks(text) if "padding" in parts[-1][0]]
    assert padded
    for (rule, part), (padding, _) in padded:
        length = int(re.search(r"to (\d+)", rule)[1]) + 1  # type: ignore[index]
        assert padding == f"padding, masked: tokens {length} to 15"
        assert part.endswith("<|endoftext|>")
        assert len(tokenizer.encode(part.removesuffix("<|endoftext|>"))) == length - 1
    assert number(text, "an epoch") == sum(-(-len(tokenizer.encode(row)) // 16) for row in ROWS)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_few_sequences_are_the_first_ones_of_many(
    packing: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few sequences, only their streams are read."""
    sizes = ("--training.global_batch_size", "12", "--data.packing", packing)
    many = printed(capsys, config, "--sequences", "13", *sizes)
    for count in (1, 3, 5):
        few = printed(capsys, config, "--sequences", str(count), *sizes)
        assert many.startswith(few.rstrip("\n") + "\n")
        assert few.count("════ sequence") == count


def test_a_mixture_has_shares(
    config: Path, write_jsonl: Callable[..., Path], tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    more = write_jsonl(ROWS[:7], "more.jsonl")
    with config.open("a") as file:
        file.write(f'weight = 3\n[[data.sources]]\nkind = "jsonl"\npath = "{more}"\nname = "more"\nweight = 1\n')
    text = printed(capsys, config, "--sequences", "0")
    rows = config.with_name("rows.jsonl")
    sources = tuple(
        SourceConfig(kind="jsonl", path=str(path), weight=weight) for path, weight in ((rows, 3.0), (more, 1.0))
    )
    section = DataConfig(num_streams=2, max_piece_bytes=60, on_bad_row="skip", sources=sources)
    drawn = [batch.sources for batch in training_batches(section, tokenizer, 100)]
    shares = [sum(int((batch == n).sum()) for batch in drawn) / 200 for n in range(2)]
    assert f"share         75.00% of the sequences (weight 3), {shares[0]:.2%} of those of the first 100 steps" in text
    assert f"share         25.00% of the sequences (weight 1), {shares[1]:.2%}" in text
    assert shares[0] == pytest.approx(0.75, abs=0.02)
    per_step = 2 * 0.25
    second = text[text.index("source 1, more") :]
    sequences, steps = number(second, "an epoch"), number(second, "sequences,")
    assert steps == pytest.approx(sequences / per_step, abs=1)
    with config.open("a") as file:
        file.write("[[training.stages]]\nfrom_step = 5\nweights = { rows = 0, more = 1 }\n")
    first = sum(int((batch == 1).sum()) for batch in drawn[:8]) / 8
    text = printed(capsys, config, "--sequences", "0")
    assert f"(weight 1), {first:.2%} of those of the first 4 steps, 100.00% in stage 2" in text


@pytest.mark.parametrize("decodes", [True, False])
def test_token_files(decodes: bool, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    tokenize.main([str(config), "--out", str(out), "--workers", "0"])
    tokens = np.load(out / "tokens-00000.npy").tolist()
    own = ["--data.sources.0.kind", "tokens", "--data.sources.0.path", str(out), "--data.sources.0.name", "files"]
    arguments = [*own, "--data.shuffle", "false", "--sequences", "3"]
    if not decodes:
        shutil.rmtree(out / "tokenizer")
    text = printed(capsys, config, *arguments, "--tokenizer.path", "")
    assert number(text[text.index("source 0") :], "documents  ") == 40
    ends = [place for place, token in enumerate(tokens) if token == tokens[-1]]
    assert number(text, "longest") == max(np.diff([-1, *ends]))
    assert number(text, "mean") == pytest.approx(len(tokens) / 40, abs=0.05)
    assert "made by" in text
    assert f"versions      titanlite {titanlite.__version__}, tokenizers " in text
    assert re.search(r"made from     rows: files 1, bytes [\d,]+, content xxh3-128:[0-9a-f]{32}\n", text)
    assert number(text, "an epoch") == (len(tokens) - 1) // 16
    if decodes:
        assert "".join(part for parts in blocks(text) for _, part in parts).startswith(ROWS[0] + "<|endoftext|>")
    else:
        assert " ".join(part for parts in blocks(text) for _, part in parts) == " ".join(map(str, tokens[:48]))
    (out / "tokens-00000.documents").unlink()
    text = printed(capsys, config, *arguments)
    assert "documents     unknown" in text
    assert [len(parts) for parts in blocks(text)] == [1, 1, 1]


def test_a_damaged_documents_file_without_a_manifest_is_named(config: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100))
    (tmp_path / "tokens.documents").write_bytes(b"damaged")
    own = ["--data.sources.0.kind", "tokens", "--data.sources.0.path", str(tmp_path / "tokens.npy")]
    with pytest.raises(UserError, match=r"tokens.documents is not a 1-D array of integers: .*magic string"):
        inspect.main([str(config), *own, "--tokenizer.path", ""])


def test_control_characters_are_escaped(
    config: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(["a\tb\n\x1b[31m é\u202e"])
    text = printed(capsys, config, "--data.sources.0.name", "x\nsource 9\x9b")
    assert "a\tb\n\\x1b[31m é\\u202e" in text
    assert "source 0, x\\nsource 9\\x9b\n" in text
    assert not set("\x1b\x9b\u202e") & set(text)


def test_an_invalid_number(config: Path) -> None:
    for number in ("-1", "99999999999999999999"):
        with pytest.raises(UserError, match=rf"--sequences = {number}\n +rule: +from (0|-2\^63) to 2\^63 - 1"):
            inspect.main([str(config), "--sequences", number])
