"""The tokens of a document do not depend on where it is cut: they are those of encoding it at once."""

import csv
import io
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from titanlite.data.blocks import take_block
from titanlite.data.config import DataConfig
from titanlite.data.corpus import Encoder, TextCorpus, build_encoder
from titanlite.data.kinds import text_sources
from titanlite.data.sources.base import ReadUnit, Row
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import CONTEXT, BadRowError, TokenPiece, cut
from titanlite.data.tokenizer import EDGE, Tokenizer

WORDS = [
    *("def", "return", "the", "model", "reads", "a", "few", "words", "système", "naïve", "言語", "モデル", "😀"),
    *("12345", "12345", "3.14", "don't", "__init__", "x=1;", "foo(bar)"),
]
GPT_4 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def text_of(seed: int, words: int = 500) -> str:
    """Words and code, with runs of spaces, line ends and digits."""
    draw = random.Random(seed)
    gaps = [" ", " ", " ", "  ", "\n", "\n\n", "\n    ", "\t", "\r\n", " " * 40, "", "\u3000", " \n "]
    return "".join(draw.choice([*WORDS, "9" * draw.randint(1, 30)]) + draw.choice(gaps) for _ in range(words))


BPE = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def kinds() -> Iterator[tuple[str, tokenizers.Tokenizer, trainers.Trainer]]:
    """Name, tokenizer and trainer of each kind of tokenizer that models have."""
    by_bytes = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    for prefix in (False, True):
        for trim in (False, True):
            tokenizer = tokenizers.Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
            yield f"byte-level, add_prefix_space {prefix}, trim_offsets {trim}", tokenizer, by_bytes
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(GPT_4, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC()
    yield "byte-level, GPT-4's words, NFC", tokenizer, by_bytes
    for scheme in ("first", "always", "never"):
        yield f"Metaspace {scheme}", metaspace(scheme), BPE
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.normalizer = normalizers.NFKC()
    yield (
        "Unigram",
        tokenizer,
        trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    yield (
        "WordPiece",
        tokenizer,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False),
    )


def like_llama_2() -> tokenizers.Tokenizer:
    """Metaspaces by a normalizer: a document is one word."""
    tokenizer = metaspace("always")
    tokenizer.train_from_iterator([text_of(0)], BPE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


KINDS = {name: (tokenizer, trainer) for name, tokenizer, trainer in kinds()}


@pytest.mark.parametrize("kind", [*KINDS, "like Llama 2"])
def test_tokens_do_not_depend_on_the_size_of_the_pieces(kind: str, tmp_path: Path) -> None:
    if kind in KINDS:
        trained, trainer = KINDS[kind]
        trained.train_from_iterator([text_of(0)], trainer)
    else:
        trained = like_llama_2()
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer(tmp_path / "tokenizer.json"), text_of(1, words=250)  # over two contexts
    assert "divide" not in tokenizer.description
    at_once, data, differing = tokenizer.encode(text), text.encode(), 0
    for size in (50, 60, 1024):
        parts = [data[begin:end].decode() for begin, end, _ in cut(data, 0, len(data), size)]
        texts, begin = [], 0
        for part in parts:
            end = begin + len(part)
            texts.append((text[max(0, begin - CONTEXT) : begin], part, text[end : end + CONTEXT]))
            begin = end
        assert [token for ids in tokenizer.encode_parts(texts) for token in ids] == at_once
        differing += [token for part in parts for token in tokenizer.encode(part)] != at_once
    assert differing, "each part by itself"


def test_tokens_that_depend_on_text_far_from_a_cut(tmp_path: Path) -> None:
    """Digits are grouped from the end of a number."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*(?!\d))"), "isolated")
    digits = "".join(random.Random(0).choices("0123456789", k=EDGE + 400))
    trained.train_from_iterator([digits], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for place in range(100, 103):
        parts = [("", digits[:place], digits[place:]), (digits[:place], digits[place:], "")]
        assert [token for ids in tokenizer.encode_parts(parts) for token in ids] == tokenizer.encode(digits)


def across_words(divider: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """Has tokens of several words, as SuperBPE does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.train_from_iterator(["▁the▁way" * 50], trainers.BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace(" ", "▁"), divider
    return tokenizer


@pytest.mark.parametrize(
    ("divides", "tokenizer"),
    [
        (True, across_words(pre_tokenizers.Metaspace())),
        (False, across_words(pre_tokenizers.Metaspace(split=False))),
        (True, across_words(pre_tokenizers.Split("▁", "merged_with_next"))),
        (False, across_words(pre_tokenizers.Split(" ", "merged_with_previous"))),  # the normalizer leaves no space
        (False, across_words(pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"))),
    ],
)
def test_a_tokenizer_without_words_is_named(divides: bool, tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Its tokens may depend on any earlier character, so equality is not promised."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    description = Tokenizer(tmp_path / "tokenizer.json").description
    assert ("It does not divide texts into words" in description) is not divides


ROWS = [text_of(seed, 200) for seed in range(3)]


def sources(folder: Path) -> Iterator[SourceConfig]:
    """Files with ROWS as their documents."""
    table = pa.table({"text": ROWS})
    pq.write_table(table, folder / "rows.parquet")
    lines = "".join(json.dumps({"text": row}) + "\n" for row in ROWS)
    for name in ("rows.jsonl", "rows.csv"):
        (folder / name).write_text(lines if name.endswith("jsonl") else csv_of(ROWS), newline="")
    for number, row in enumerate(ROWS):
        (folder / f"{number}.txt").write_bytes(row.encode())
    yield SourceConfig("text", path=str(folder), document="file")
    for kind in ("jsonl", "csv", "parquet"):
        yield SourceConfig(kind, path=str(folder))  # type: ignore[arg-type]


def csv_of(rows: Sequence[str]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["text"], *([row] for row in rows)])
    return out.getvalue()


@pytest.fixture
def with_prefix(tmp_path: Path) -> Tokenizer:
    """A tokenizer that adds a space at the beginning of a text."""
    trained, trainer = KINDS["byte-level, add_prefix_space True, trim_offsets False"]
    trained.add_special_tokens(["<eos>"])
    trained.train_from_iterator([text_of(0)], trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json", eos="<eos>")


def tokens_of(pieces: Iterable[TokenPiece | Exception]) -> list[int]:
    return [token for piece in pieces if isinstance(piece, TokenPiece) for token in piece.tokens.tolist()]


def test_each_kind_of_source_has_the_tokens_of_entire_documents(with_prefix: Tokenizer, tmp_path: Path) -> None:
    at_once = [token for row in ROWS for token in [*with_prefix.encode(row), with_prefix.eos_id]]
    (tmp_path / "corpus").mkdir()
    for source in sources(tmp_path / "corpus"):
        for reads_context in (True, False):
            section = DataConfig(add_bos=False, add_eos=True, stream_version=3 if reads_context else 2)
            encoder = build_encoder(source, with_prefix, section)
            corpus = TextCorpus(text_sources([source]), 300, encoder)
            assert corpus.count > 3 * len(ROWS)
            backwards = list(reversed(corpus.fetch(range(corpus.count)[::-1])))
            assert tokens_of(corpus.fetch(range(corpus.count))) == tokens_of(backwards)
            assert (tokens_of(backwards) == at_once) == reads_context, source.kind


def test_streamed_rows_have_the_tokens_of_entire_documents(with_prefix: Tokenizer) -> None:
    at_once = [token for row in ROWS for token in [*with_prefix.encode(row), with_prefix.eos_id]]
    rows = (Row(number, row.encode()) for number, row in enumerate(ROWS, 1))
    block = take_block(ReadUnit("rows.jsonl"), rows, 300)
    encoder = Encoder(with_prefix, add_bos=False, add_eos=True)
    for characters in (CONTEXT, 0):
        texts = [block.with_context(piece, characters) for piece in range(len(block.parts))]
        assert (tokens_of(encoder.encode(texts, str)) == at_once) == bool(characters)


def test_a_cut_after_a_long_run_of_spaces(tmp_path: Path) -> None:
    """With a token for four spaces, the tokens of a word after them are the same with and without its space."""
    library = tokenizers.Tokenizer(models.BPE({"▁": 0, "x": 1, "▁x": 2}, [("▁", "x")]))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_tokens(["    "])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for size in range(1020, 1024):
        texts = ("x", " " * size, "x")
        parts = tokenizer.encode_parts([("", "x", texts[1] + "x"), texts, ("x" + texts[1], "x", "")])
        assert [one for part in parts for one in part] == tokenizer.encode("".join(texts))


def test_a_cut_behind_an_added_token_before_a_line_end(tmp_path: Path) -> None:
    """If offsets are trimmed, the space that is added behind the token begins after the line end."""
    ids = {text: number for number, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĊ"])}
    library = tokenizers.Tokenizer(models.BPE(ids, [("Ġ", "Ċ")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.add_tokens(["<tool>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for size in range(1, 20):
        before, after = "a" * size + "<tool>", "x" * 2 * EDGE
        parts = [("", before, f"\n{after}"), (before, "\n", after), (f"{before}\n", after, "")]
        at_once = tokenizer.encode(f"{before}\n{after}")
        assert [one for part in tokenizer.encode_parts(parts) for one in part] == at_once


REMOVING = {
    "Replace": (normalizers.Replace(Regex("[^a-z ]"), ""), None),
    "Prepend": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex("[^a-z▁]"), "")]), None),
    "Metaspace": (normalizers.Replace(Regex("[^a-z ]"), ""), pre_tokenizers.Metaspace()),
    "Split": (None, pre_tokenizers.Split(Regex("[^a-z]+"), "removed")),
    "WordPiece": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
}


@pytest.mark.parametrize("kind", REMOVING)
def test_a_document_without_a_token_of_its_text_is_a_bad_row(kind: str, tmp_path: Path) -> None:
    """Not a part of a document, nor white space, accents and characters without width."""
    ids = {text: number for number, text in enumerate(["[UNK]", "a", "▁", " "])}
    library = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]") if kind == "WordPiece" else models.BPE(ids, [], unk_token="[UNK]")
    )
    library.normalizer, library.pre_tokenizer = REMOVING[kind]
    library.save(str(tmp_path / "tokenizer.json"))
    lost = "\ufffd" if kind == "WordPiece" else "1"
    rows = [lost, f"{lost} {lost}", " ", "\u200b\ufe0f", "\u0301", "▁", f"a{lost * 2000}a", f"a{lost}a", lost * 2000]
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert "no tokens" not in tokenizer.description
    encoder = Encoder(tokenizer, add_bos=False, add_eos=False)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = TextCorpus(text_sources([SourceConfig("jsonl", path=str(tmp_path))]), 300, encoder)
    block = take_block(ReadUnit("f"), (Row(number, row.encode()) for number, row in enumerate(rows, 1)), 300)
    streamed = encoder.encode([block.with_context(piece, 0) for piece in range(len(block.parts))], block.locate)
    for pieces in (corpus.fetch(range(corpus.count)), streamed):
        bad = {str(piece).split(":")[0].split()[-1] for piece in pieces if isinstance(piece, BadRowError)}
        assert bad == {"1", "2", "9"}
        assert all("removes all of its text" in str(piece) for piece in pieces if isinstance(piece, BadRowError))
