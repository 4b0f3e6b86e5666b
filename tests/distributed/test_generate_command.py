"""`titanlite generate` on a run that two ranks have saved."""

import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.program import PATIENCE_S, REPOSITORY, clean_environment, start_program, write_text
from titanlite.checkpoint.folder import step_folder
from titanlite.runtime.errors import ConfigError
from titanlite.tools.generate.__main__ import main
from titanlite.tools.saved_run import SavedRun, open_run

STEPS = 3
MAX_SEQ_LEN = 5000
PROMPT = "the model"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("own_log"),
]  # the shared training run takes longer than the tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of a run with checkpoints of 3 steps, each in shards of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    start_program(
        folder,
        *write_text(folder),
        *("--model.max_seq_len", str(MAX_SEQ_LEN), "--training.steps", str(STEPS)),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "1"),
        *("--checkpoint.keep_latest_k", "0", "--parallelism.tp", "2"),
        ranks=2,
    ).succeed()
    return folder / "out"


@pytest.fixture
def text_of(trained: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command and return its stdout."""

    def printed(*arguments: str) -> str:
        capsys.readouterr()
        main([str(trained), "--max-new-tokens", "20", *arguments])
        return capsys.readouterr().out

    return printed


def greedy(run: Path, prompt: str, count: int) -> str:
    """Expected output, computed without the command's code: a full forward pass for each token."""
    saved = open_run(run)
    model, tokenizer = saved.model(torch.device("cpu"), torch.float64), saved.tokenizer()
    assert tokenizer is not None
    prompt_tokens = tokens = tokenizer.encode(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    assert tokenizer.eos_id not in tokens
    return prompt + tokenizer.decode(tokens)[len(tokenizer.decode(prompt_tokens)) :] + "\n"


def test_greedy_text_matches_full_forward_passes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trained), "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20"])
    printed = capsys.readouterr()
    assert printed.out == greedy(trained, PROMPT, 20)
    assert re.search(r"step-3: llama3, float64 on c\w+\n", printed.err)
    assert re.search(r" 20 tokens in [\d.]+ s, [\d.]+ tokens/s\n$", printed.err)
    assert "warning: the run was trained on sequences of 16 tokens" in printed.err
    step = str(step_folder(trained / "checkpoint", 1))
    main([step, "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20"])
    assert capsys.readouterr().out != printed.out


def test_several_texts_are_printed_one_after_another(
    trained: Path, tmp_path: Path, text_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("says\n  it")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    prompts = ("--prompt", PROMPT, "--prompt-file", str(tmp_path / "a.txt"), "--prompt-file", "-")
    texts = [greedy(trained, prompt, 20) for prompt in (PROMPT, "says\n  it", "é\n")]
    expected = "".join(f"--- {row} of 3\n{text}" for row, text in enumerate(texts, 1))
    assert text_of("--temperature", "0", *prompts) == expected


def test_seed_determines_the_samples(text_of: Callable[..., str]) -> None:
    drawn = ("--prompt", PROMPT, "--temperature", "1.5", "--top-k", "50", "--top-p", "0.99")
    first = text_of(*drawn)
    assert first == text_of(*drawn, "--seed", "0")
    assert first != text_of(*drawn, "--seed", "1")
    assert text_of("--prompt", PROMPT) == text_of("--prompt", PROMPT, "--temperature", "0.8", "--top-p", "1")
    assert text_of("--prompt", PROMPT, "--top-k", "1") == text_of("--prompt", PROMPT, "--temperature", "0")


def test_other_dtypes(text_of: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    found = text_of("--prompt", PROMPT, "--temperature", "0", "--dtype", "float32", "--device", "cpu")
    assert found == text_of("--prompt", PROMPT, "--temperature", "0")
    assert text_of("--prompt", PROMPT, "--dtype", "bfloat16").startswith(PROMPT)
    capsys.readouterr()


def test_prompts_of_invalid_length_are_rejected_before_weights_are_read(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedRun, "model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as error:
        main([str(trained), "--prompt", "", "--prompt", "~" * MAX_SEQ_LEN, "--prompt", PROMPT])
    empty, long = error.value.problems
    assert (empty.key, empty.value) == ("--prompt", "")
    assert "at least one token: this run's documents start without BOS" in empty.rule
    assert (long.key, long.value) == ("--prompt", "~" * 60 + "…")
    assert long.rule == f"fewer tokens than model.max_seq_len = {MAX_SEQ_LEN}; it has {MAX_SEQ_LEN}"
    with pytest.raises(ConfigError) as error:
        main([str(trained), "--prompt", "~" * 10, "--max-new-tokens", "4991"])
    (count,) = error.value.problems
    assert (count.key, count.value, count.remedy) == ("--max-new-tokens", 4991, "set it to 4990, or shorten the prompt")


def start(run: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "titanlite.tools.generate", str(run), "--prompt", PROMPT, "--temperature", "0"]
    return subprocess.Popen(
        [*command, *arguments],
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # unread output stays in the pipe
    )


def test_an_interrupt_stops_generation_and_keeps_its_output(trained: Path) -> None:
    """Seconds before the end of the text. Ctrl-C in a terminal sends SIGINT."""
    with start(trained, "--max-new-tokens", "4000") as program:
        assert program.stdout is not None
        try:
            begun = b""
            while len(begun) < 60:
                more = program.stdout.read(60)
                assert more, program.communicate()[1]
                begun += more
            program.send_signal(signal.SIGINT)
            rest, errors = program.communicate(timeout=PATIENCE_S)
        finally:
            program.kill()
    assert program.returncode == 130
    assert b"\ntitanlite: interrupted\n" in errors
    assert b"Traceback" not in errors
    expected = greedy(trained, PROMPT, 60)[:-1].encode()
    length = min(len(expected), len(begun + rest))
    assert length > 60
    assert (begun + rest)[:length] == expected[:length]


@pytest.mark.soak  # default suite: tests/unit/test_commands.py
def test_a_closed_pipe_stops_generation(trained: Path) -> None:
    with start(trained, "--max-new-tokens", "4000") as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            assert program.stdout.read(1) == PROMPT[:1].encode()
            program.stdout.close()
            assert program.wait(PATIENCE_S) == 1
            assert b"Traceback" not in program.stderr.read()
        finally:
            program.kill()
