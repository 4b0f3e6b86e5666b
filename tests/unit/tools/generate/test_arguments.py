"""The command's arguments, without a run; its output, without a model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch

from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.generate import Prompt, TextStream, encode_prompts
from titanlite.models.llama3 import LLAMA3
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.tools.generate import __main__ as command
from titanlite.tools.generate.texts import print_texts
from titanlite.tools.saved_run import SavedRun

BAD = {
    "--max-new-tokens": ("0", "-1"),
    "--temperature": ("-0.1", "nan", "inf"),
    "--top-k": ("-1", "-3"),
    "--top-p": ("0", "1.01", "-1", "nan"),
    "--seed": ("-1", str(2**63)),
    "--prompt-file": ("nowhere", "."),
}

SIZE = 300
"""Tokens of the tokenizer in tokenizer_folder."""


def problems_of(*arguments: str) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        command.main(["run", *arguments])
    return list(error.value.problems)


@pytest.fixture
def never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_run", lambda _: pytest.fail("the run was opened"))


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_named_before_the_run_is_opened(key: str, value: str) -> None:
    (problem,) = problems_of("--prompt", "x", f"{key}={value}")
    assert problem.key == key
    assert str(problem.value) == str(type(problem.value)(value))
    assert problem.rule
    assert problem.remedy


@pytest.mark.usefixtures("never_opened")
def test_all_bad_values_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    bad = [f"{key}={values[0]}" for key, values in BAD.items()]
    broken = ["--device=cuda", f"--prompt-file={tmp_path / 'latin.txt'}", "--prompt=\udce9"]
    found = problems_of(*bad, *broken)
    assert sorted(problem.key for problem in found) == sorted([*BAD, "--device", "--prompt", "--prompt-file"])


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("", "--prompt", "required, unless --prompt-file is given"),
        ("--prompt-file nowhere", "--prompt-file", "in UTF-8 (the file does not exist)\n    remedy: fix the path"),
        ("--prompt-file /dev/zero", "--prompt-file", "not a regular file"),
        ("--prompt-file /dev/zero", "--prompt-file", "titanlite generate RUN --prompt-file -"),
        ("--system=x --prompt=x", "--system", "only with --chat"),
        ("--chat-template=nowhere --chat", "--chat-template", "a file with a chat template"),
        ("--ignore-eos --chat", "--ignore-eos", "not with --chat"),
    ],
)
def test_a_problem_and_its_remedy(arguments: str, key: str, text: str) -> None:
    (problem,) = problems_of(*arguments.split())
    assert problem.key == key
    assert text in str(problem)


def test_documents_that_start_with_bos(tokenizer_folder: Path, tmp_path: Path) -> None:
    with_bos = Tokenizer(tokenizer_folder / "tokenizer.json", bos="<|endoftext|>")
    limits = {"max_new_tokens": 5, "max_seq_len": 20}
    prompts = [Prompt("--prompt", "the"), Prompt("--prompt", "")]
    found = encode_prompts(prompts, with_bos, starts_with_bos=True, **limits)
    assert [list(prompt.ids) for prompt in found] == [[with_bos.bos_id, *with_bos.encode("the")], [with_bos.bos_id]]
    assert list(encode_prompts(prompts[:1], with_bos, starts_with_bos=False, **limits)[0].ids) == with_bos.encode("the")
    without = Tokenizer(tokenizer_folder / "tokenizer.json")
    with pytest.raises(ConfigError, match="the run was trained on documents that start with one"):
        encode_prompts(prompts, without, starts_with_bos=True, **limits)
    library = tokenizers.Tokenizer.from_str(with_bos.content.decode())
    library.normalizer = tokenizers.normalizers.Replace("the", "")
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="text that the tokenizer does not remove"):
        encode_prompts(
            prompts, Tokenizer(tmp_path / "tokenizer.json", bos="<|endoftext|>"), starts_with_bos=True, **limits
        )


def run_on(folder: Path, fingerprint: str | None, vocab_size: int = 310, found: Tokenizer | None = None) -> SavedRun:
    """A run with the parts that find_tokenizer uses. Its own tokenizer is `found`."""

    class Run(SavedRun):
        def tokenizer(self) -> Tokenizer | None:
            return found

    manifest: Any = SimpleNamespace(facts={"tokenizer": fingerprint}, config={"job": {}, "model": {}})
    return Run(folder, manifest, LLAMA3, replace(LLAMA3.flavors["debug"], vocab_size=vocab_size))


def test_a_run_without_tokenizer_requires_the_option(tokenizer_folder: Path, tmp_path: Path) -> None:
    for fingerprint, why in ((None, "was trained on tokens"), ("f", "has lost its tokenizer")):
        with pytest.raises(ConfigError, match=f"--tokenizer\n.*needed: {tmp_path} {why}"):
            command.find_tokenizer(run_on(tmp_path, fingerprint), None)
    found = command.find_tokenizer(run_on(tmp_path, None), str(tokenizer_folder))
    assert (found.vocab_size, found.eos_id) == (SIZE, 0)
    assert command.find_tokenizer(run_on(tmp_path, "f", found=found), None) is found
    with pytest.raises(ConfigError, match=f"at most the model's vocab_size = {SIZE - 1} tokens; it has {SIZE}"):
        command.find_tokenizer(run_on(tmp_path, None, SIZE - 1), str(tokenizer_folder))
    with pytest.raises(ConfigError, match=r"--tokenizer\n.*at most the model's vocab_size"):
        command.find_tokenizer(run_on(tmp_path, "f", SIZE - 1, found), None)
    with pytest.raises(ConfigError, match="--tokenizer = 'nowhere'"):
        command.find_tokenizer(run_on(tmp_path, None), "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a readable tokenizer"):
        command.find_tokenizer(run_on(tmp_path, None), str(tmp_path))


def test_a_different_tokenizer_is_used_with_a_warning(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Tokenizer(tokenizer_folder / "tokenizer.json")
    command.find_tokenizer(run_on(tmp_path, own.fingerprint), str(tokenizer_folder))
    assert caplog.text == ""
    command.find_tokenizer(run_on(tmp_path, "another"), str(tokenizer_folder))
    assert f"{tmp_path} was trained with a different tokenizer than {tokenizer_folder}" in caplog.text


class Written(list[str]):
    """Replaces stdout; contains the text at each flush."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        self.append(self.text)


def test_the_first_incomplete_text_is_streamed(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tokenizer_folder / "tokenizer.json")
    eos_id = tokenizer.eos_id
    prompts = encode_prompts(
        [Prompt("--prompt", text) for text in "xyz"], tokenizer, starts_with_bos=False, max_new_tokens=9, max_seq_len=20
    )
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    half = tokenizer.encode("🦊")[0]
    steps = [[a, b, c], [half, eos_id, c], [eos_id, None, c], [None, None, c], [None, None, half]]
    out = Written()
    monkeypatch.setattr("sys.stdout", out)
    streams = [TextStream(tokenizer, prompt.ids) for prompt in prompts]
    assert print_texts(prompts, streams, steps, {eos_id}) == 10
    first, rest = "--- 1 of 3\nx", "a�\n--- 2 of 3\nyb\n--- 3 of 3\nz"
    assert out == [
        first,
        f"{first}a",
        f"{first}a",
        f"{first}{rest}ccc",
        f"{first}{rest}cccc",
        f"{first}{rest}cccc",
        f"{first}{rest}cccc�\n",
    ]


def test_a_single_text_has_no_heading_and_may_show_its_eos(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer(tokenizer_folder / "tokenizer.json")
    prompt = Prompt("--prompt", "x", tuple(tokenizer.encode("x")))
    for eos_ids, shown in (([tokenizer.eos_id], ""), ([], "<|endoftext|>")):
        print_texts([prompt], [TextStream(tokenizer, prompt.ids)], [[tokenizer.eos_id]], eos_ids)
        assert capsys.readouterr().out == f"x{shown}\n"
