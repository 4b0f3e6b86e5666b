"""A token folder instead of text, without [tokenizer]: train, generate, evaluate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.program import TEXT, rows, start_command
from tests.distributed.reference import SEQ_LEN
from titanlite.data.bpe import train_bpe
from titanlite.tools.generate import __main__ as generate
from titanlite.tools.saved_run import open_run
from titanlite.tools.tokenize import __main__ as tokenize

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_log")]

LAYOUT = f"""
flavor = "debug"
[training]
steps = 2
seq_len = {SEQ_LEN}
local_batch_size = 4
[checkpoint]
enable = true
[samples]
prompts = ["the model"]
max_new_tokens = 5
[validation]
enable = true
[[validation.sources]]
kind = "text"
path = "text.txt"
"""


@pytest.fixture
def tokens_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The lines that `titanlite tokenize` prints. The tokenizer that it was given is deleted afterwards."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 100)
    Path("my-tokenizer").mkdir()
    train_bpe(iter([TEXT] * 4), 280, Path("my-tokenizer"))
    Path("text.toml").write_text(
        '[tokenizer]\npath = "my-tokenizer"\nbos = "t"\n[data]\nadd_bos = true\n'
        '[[data.sources]]\nkind = "text"\npath = "text.txt"\ndocument = "line"\n'
    )
    tokenize.main(["text.toml", "--out", "tokens", "--workers", "0"])
    shutil.rmtree("my-tokenizer")
    printed = capsys.readouterr().out
    return printed[printed.index("[model]") :]


def test_train_generate_and_evaluate(tokens_toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, model, rest = tokens_toml.partition("[model]\n")
    vocab_size, _, rest = rest.partition("\n")
    Path("my.toml").write_text(f"{head}{model}{vocab_size}{LAYOUT}{rest}")
    program = start_command(tmp_path, "my.toml", ranks=2).succeed()
    assert "Tokenizer: " in program.output
    (validated,) = (row for row in rows(tmp_path / "outputs") if "validation/bits_per_byte" in row)
    (sample,) = map(json.loads, Path("outputs/samples.jsonl").read_text().splitlines()[:1])

    tokenizer = open_run(Path("outputs")).tokenizer()
    assert tokenizer is not None
    manifest = json.loads(Path("tokens/tokens.json").read_text())
    assert tokenizer.fingerprint == manifest["tokenizer"]["fingerprint"]
    assert np.load("tokens/tokens-00000.npy")[0] == tokenizer.bos_id

    capsys.readouterr()
    generate.main(["outputs", "--prompt", "the model", "--temperature", "0", "--max-new-tokens", "5"])
    assert capsys.readouterr().out == f"{sample['prompt']}{sample['text']}\n"
    program = start_command(tmp_path, "outputs", program=("-m", "titanlite.tools.evaluate")).succeed()
    assert f"{validated['validation/bits_per_byte']:.6g}" in program.output
