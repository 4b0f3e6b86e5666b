import json
import re
import resource
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.ranks import build
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools import train_tokenizer
from titanlite.tools.tokenize import __main__ as tokenize


@pytest.fixture
def config(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_folder: Path) -> Path:
    rows = write_jsonl([f"the model reads {n} words\n" * (1 + n % 5) for n in range(40)])
    file = tmp_path / "config.toml"
    file.write_text(
        f'[tokenizer]\npath = "{tokenizer_folder}"\n[data]\nmax_piece_bytes = 60\n'
        f'[[data.sources]]\nkind = "jsonl"\npath = "{rows}"\n'
    )
    return file


def tokenize_here(arguments: list[str]) -> None:
    tokenize.main([*arguments, "--workers", "0"])


EXISTS, IS_A_FILE = "is not overwritten", "/tokens.npy is a file: choose a new folder for --out"


def toml_of(printed: str) -> dict[str, object]:
    return tomllib.loads(printed[printed.index("[model]") :])


def test_tokenize_writes_the_tokens_of_one_unshuffled_stream(
    config: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    tokenize_here([str(config), "--out", str(out)])
    tokens = np.load(out / "tokens-00000.npy", mmap_mode="r")
    assert tokens.dtype == np.uint16
    assert int((tokens == tokenizer.eos_id).sum()) == 40
    rows = SourceConfig(kind="jsonl", path=str(tmp_path / "rows.jsonl"), epochs=1)
    section = DataConfig(num_streams=1, shuffle=False, max_piece_bytes=60, sources=(rows,))
    loader = build(section, tokenizer, seq_len=7, global_batch_size=1)
    packed = [tokens[0]]
    while not loader.ended[0]:
        labels = loader.next_step()[0].labels
        packed += labels[labels >= 0].tolist()
    loader.close()
    assert tokens.tolist() == packed
    printed = capsys.readouterr().out
    assert f"{len(tokens):,} tokens of 40 documents, uint16, 1 shard;" in printed
    assert toml_of(printed) == {
        "model": {"vocab_size": 300},
        "data": {"sources": [{"kind": "tokens", "path": str(out)}]},
    }


@pytest.mark.parametrize("command", [tokenize_here, train_tokenizer.main])
def test_nothing_is_overwritten_and_no_temporary_file_remains(
    command: Callable[[list[str]], None], config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine" / "tokens.npy"
    file.parent.mkdir()
    file.write_text("precious")
    for out, reason in ((file.parent, EXISTS), (file, f"{EXISTS}|{IS_A_FILE}"), (file / "out", IS_A_FILE)):
        with pytest.raises(UserError, match=reason):
            command([str(config), "--out", str(out)])
    assert file.read_text() == "precious"
    assert [*file.parent.iterdir()] == [file]
    assert not list(tmp_path.glob("*.incomplete*"))


@pytest.mark.parametrize("command", [tokenize_here, train_tokenizer.main])
def test_a_full_disk(command: Callable[[list[str]], None], config: Path, tmp_path: Path) -> None:
    command([str(config), "--out", str(tmp_path / "first")])  # builds the index
    out, before = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))  # as on a full disk, a write fails in the middle
    try:
        with pytest.raises(UserError) as caught:
            command([str(config), "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"cannot write {out}: File too large; fix this, or choose another --out"


@pytest.mark.parametrize("command", [tokenize_here, train_tokenizer.main])
def test_the_printed_path_is_toml(
    command: Callable[[list[str]], None], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command([str(config), "--out", str(tmp_path / 'a "b" \\n')])
    assert str(tmp_path / 'a "b" \\n') in str(toml_of(capsys.readouterr().out)).replace("\\\\", "\\")


@pytest.mark.usefixtures("stdlib")
def test_the_standard_library_is_tokenized_as_training_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("[model]\nvocab_size = 290\n")
    tokenize_here([str(tmp_path / "c.toml"), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert toml_of(printed)["model"] == {"vocab_size": 290}
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 200"):
        tokenize.main([str(tmp_path / "c.toml"), "--out", str(tmp_path / "no"), "--model.vocab_size", "200"])


@pytest.mark.parametrize("command", [tokenize_here, train_tokenizer.main])
def test_bad_rows(
    command: Callable[[list[str]], None],
    config: Path,
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(["good text here", b"{", "and here", b"[]"])
    arguments = [str(config), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: invalid JSON"):
        command(arguments)
    assert not list((tmp_path / "out").glob("*.npy"))
    with pytest.raises(UserError, match=r"more than data\.max_bad_rows = 1 bad rows"):
        command([*arguments, "--data.on_bad_row", "skip", "--data.max_bad_rows", "1"])
    command([*arguments, "--data.on_bad_row", "skip"])
    assert "2 bad rows" in capsys.readouterr().out


def test_a_tokenizer_has_the_size_of_the_model_unless_given(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model.vocab_size", "290"]
    train_tokenizer.main([str(config), "--out", str(tmp_path / "trained"), "--vocab_size", "280", *model])
    tokenizer = Tokenizer(tmp_path / "trained" / "tokenizer.json")
    assert tokenizer.vocab_size == 280
    assert tokenizer.eos_id is not None
    assert len(tokenizer.encode(" model reads")) < 12
    expected = {"model": {"vocab_size": 280}, "tokenizer": {"path": str(tmp_path / "trained")}}
    assert toml_of(capsys.readouterr().out) == expected
    train_tokenizer.main([str(config), "--out", str(tmp_path / "of-model"), *model])
    assert Tokenizer(tmp_path / "of-model" / "tokenizer.json").vocab_size == 290
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer.main([str(config), "--out", str(tmp_path / "other"), "--vocab-size", "256"])


def test_special_tokens_of_a_trained_tokenizer(config: Path, tmp_path: Path) -> None:
    special = ["<|user|>", "[é 1]"]
    train_tokenizer.main([str(config), "--out", str(tmp_path / "out"), "--special-tokens", *special])
    tokenizer = Tokenizer(tmp_path / "out" / "tokenizer.json")
    added = json.loads(tokenizer.content)["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in added] == [
        (0, "<|endoftext|>", True),
        *((number, text, True) for number, text in enumerate(special, 1)),
    ]
    assert tokenizer.eos_id == 0
    text = "".join(special)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert min(tokenizer.encode(text)) > 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["user"], "--special-tokens = 'user'\n    rule:   texts of several words, such as <|user|>"),
        (["<|a|>", "--vocab-size", "257"], "--vocab-size = 257\n    rule:   at least 258: a token for each byte"),
        (["<|a|>", "--model.vocab_size", "257"], "model.vocab_size = 257\n    rule:   at least 258: a token for each"),
    ],
)
def test_special_tokens_that_are_refused(arguments: list[str], problem: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        train_tokenizer.main([str(config), "--out", str(tmp_path / "out"), "--special-tokens", *arguments])
    assert not (tmp_path / "out").exists()


def test_all_problems_at_once(config: Path, tmp_path: Path) -> None:
    wrong = ["--data.seed", "-1", "--tokenizer.path", "nowhere", "--data.sources.0.path", "nothing"]
    with pytest.raises(ConfigError) as caught:
        tokenize.main([str(config), "--out", str(tmp_path / "out"), *wrong])
    assert [problem.key for problem in caught.value.problems] == ["data.seed", "data.sources.0.path", "tokenizer.path"]


@pytest.mark.parametrize(("kind", "name"), [("tokens", "tokens.npy"), ("chat", "rows.jsonl")])
def test_only_documents_are_tokenized(kind: str, name: str, config: Path, tmp_path: Path) -> None:
    """The files of conversations would not contain which tokens are trained on."""
    np.save(tmp_path / "tokens.npy", np.arange(10))
    source = ["--data.sources.0.kind", kind, "--data.sources.0.path", str(tmp_path / name)]
    with pytest.raises(ConfigError, match=r"data.sources.0.kind"):
        tokenize.main([str(config), "--out", str(tmp_path / "out"), *source])
