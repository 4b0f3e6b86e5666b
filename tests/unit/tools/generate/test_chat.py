"""titanlite generate --chat, with a small model that has learned a few conversations by heart."""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from torch.nn import functional

import titanlite
from tests.distributed.program import PATIENCE_S, REPOSITORY, clean_environment
from titanlite.data.bpe import train_bpe
from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.chat.messages import Conversation
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.generate import Sampling
from titanlite.hf.safetensors import write_tensors
from titanlite.models.init import init_parameters_
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config
from titanlite.models.registry import structure_of
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.convert.__main__ import main as convert
from titanlite.tools.convert.export_run import generation_json
from titanlite.tools.generate import __main__ as command
from titanlite.tools.generate.__main__ import main
from titanlite.tools.generate.chat import Answer, ChatModel, Dialog, read_message
from titanlite.tools.saved_run import SavedRun, open_run

pytestmark = pytest.mark.slow  # the shared training takes longer than the tests

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOUT = "Shout."
CONVERSATIONS = (
    ("", "I am Ada", "Hello Ada", "Who am I?", "You are Ada 🦊"),
    ("", "I am Bob", "Hello Bob", "Who am I?", "You are Bob"),
    ("", "Who am I?", "I do not know", "I am Bob", "Hello Bob"),
    (SHOUT, "I am Ada", "HELLO ADA"),
    ("", "two\nlines", "\x1b[2J", "more", "a\nb"),
)
MAX_SEQ_LEN = 160
ALSO_EOS = 299


def messages(system: str, *texts: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}] * bool(system) + turns


def write_tokenizer(folder: Path) -> Tokenizer:
    train_bpe(iter([" ".join(each) for each in CONVERSATIONS] * 4), 290, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder / "tokenizer.json")


def learned(tokenizer: Tokenizer, config: Llama3Config) -> Llama3:
    """A model that has learned the conversations by heart."""
    model = Llama3(config)
    model.init_buffers(torch.device("cpu"))
    init_parameters_(model, 1, structure_of(LLAMA3, config, model).init)
    encoded = ChatEncoder(tokenizer).encode([Conversation(messages(*each)) for each in CONVERSATIONS], "assistant")
    length = max(len(each.tokens) for each in encoded)
    tokens = torch.tensor([[*each.tokens, *[0] * (length - len(each.tokens))] for each in encoded])
    trained = torch.tensor([[*each.trained, *[False] * (length - len(each.trained))] for each in encoded])
    labels = tokens.masked_fill(~trained, -100)[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(300):
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 2e-3:
            break
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of an imported run. Its defaults: greedy, and two ids that end a text."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_tokenizer(folder)
    config = Llama3Config(64, 2, 4, 2, 128, tokenizer.vocab_size + 10, max_seq_len=MAX_SEQ_LEN)
    names = LLAMA3.exported.names(config)
    parameters = dict(learned(tokenizer, config).named_parameters())
    write_tensors(folder / "model.safetensors", {names[name]: value.detach() for name, value in parameters.items()})
    about = {"model_type": LLAMA3.exported.model_type} | LLAMA3.exported.config_json(config)
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, ALSO_EOS], "do_sample": False}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLITE_CACHE", str(folder / "cache"))
        convert(["import", str(folder), "--out", str(folder / "run")])
    return folder / "run"


def tokenizer_of(run: Path) -> Tokenizer:
    tokenizer = open_run(run).tokenizer()
    assert tokenizer is not None
    return tokenizer


Said = Callable[..., str]


@pytest.fixture
def said(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """said(stdin, *arguments): stdout of the command; of its stderr, only remarks are allowed, as in [remark]."""

    def call(stdin: str, *arguments: str, remarks: Sequence[str] = ()) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        main([str(run), "--chat", *arguments])
        out, errors = capsys.readouterr()
        assert [line[1:-1] for line in errors.splitlines() if line.startswith("[")] == [*remarks]
        return out

    return call


def test_answers_depend_on_the_history(said: Said) -> None:
    for _, *texts in CONVERSATIONS[:3]:
        assert said("".join(f"{text}\n" for text in texts[::2])) == "".join(f"{text}\n" for text in texts[1::2])
    forgotten = said("I am Ada\n\n/reset\nWho am I?\n/help\n", remarks=["a new conversation begins"])
    assert forgotten == "Hello Ada\nI do not know\n"
    assert said("two\\\nlines\nmore") == "\x1b[2J\na\nb\n"
    assert said("") == ""


def test_messages_as_options(said: Said, tmp_path: Path) -> None:
    (tmp_path / "second.txt").write_text("Who am I?\n")
    file = str(tmp_path / "second.txt")
    assert said("/reset", "--prompt", "I am Bob", "--prompt-file", file) == "Hello Bob\nYou are Bob\n"
    assert said("", "--prompt", "I am Ada", "--system", SHOUT) == "HELLO ADA\n"


class OnTerminal(io.StringIO):
    """Replaces stdin."""

    def isatty(self) -> bool:
        return True


def test_limits_of_an_answer_and_of_a_conversation(
    said: Said, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(run)
    cut = tokenizer.decode(tokenizer.encode("Hello Ada")[:2])
    options = ("--max-new-tokens", "2", "--prompt", "I am Ada")
    assert said("", *options, remarks=["the answer was cut after --max-new-tokens = 2"]) == f"{cut}\n"
    long = "~" * MAX_SEQ_LEN
    with pytest.raises(UserError, match=r"has \d+ tokens, which leaves no room for an answer: the model has 160 pos"):
        said("", "--prompt", long)
    frame = len(ChatEncoder(tokenizer).prompt(messages("", "~"))) - 1
    with pytest.raises(UserError, match="has 160 tokens"):
        said("", "--prompt", long[frame:])
    said("", "--prompt", long[frame + 1 :], remarks=["the answer was cut at the model's last position, 160"])
    monkeypatch.setattr("sys.stdin", OnTerminal(f"I am Ada\n{long}\n\ufdd2\n/exit\nWho am I?\n"))
    main([str(run), "--chat"])
    out, errors = capsys.readouterr()
    assert out == "Hello Ada\nYou are Ada 🦊\n", "a message that is refused leaves the conversation as it was"
    assert "[the conversation cannot be encoded: turn 3: it has one of the characters U+FDD2" in errors
    assert "[/exit is no command; /help lists them]" in errors
    assert "type /reset to begin a new one, or write a shorter message]" in errors


def test_special_tokens_are_not_shown_and_the_text_is_that_of_all_tokens(run: Path) -> None:
    """Also of characters of several tokens. The end of the turn, and each further id, ends the answer."""
    tokenizer = tokenizer_of(run)
    encoder = ChatEncoder(tokenizer)
    text = "🦊 Ada, naïve\n" * 3
    ids, start, end = tokenizer.encode(text), encoder.prompt(messages("", "?"))[0], encoder.stop_ids[0]
    assert (tokenizer.decode([start]), tokenizer.decode([end])) == ("<|im_start|>", "<|im_end|>")
    for stop in (end, ALSO_EOS):
        tokens = (*ids[:9], start, *ids[9:], stop)
        transcript: Any = SimpleNamespace(answer=lambda *_, tokens=tokens, **__: iter(tokens))
        model = ChatModel(transcript, tokenizer, encoder, Sampling(), {end, ALSO_EOS}, 99, 999, 999)
        answer = model.answer(messages("", "?"))
        pieces = list(answer)
        assert "".join(pieces) == answer.text == tokenizer.decode(ids) == text
        assert len(pieces) > 10
        assert answer.limit is None


def test_an_answer_that_is_cut_inside_a_character_and_the_seeds_of_answers(run: Path) -> None:
    tokenizer, seeds = tokenizer_of(run), []
    half = tokenizer.encode("Ada 🦊")[:-1]

    def cut(_: Sequence[int], sampling: Sampling, **__: Any) -> Iterator[int]:
        seeds.append(sampling.seed)
        yield from half

    transcript: Any = SimpleNamespace(answer=cut)
    model = ChatModel(transcript, tokenizer, ChatEncoder(tokenizer), Sampling(seed=2**63 - 1), (), 99, 999, 999)
    for texts in (("?",), ("?", "!", "?")):
        assert "".join(model.answer(messages("", *texts))) == tokenizer.decode(half) != "Ada "
    assert seeds == [2**63 - 1, 0]


def test_a_message_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\\\nlines\nmore\\"))
    assert [read_message() for _ in range(3)] == ["two\nlines", "more", None]


def test_what_a_stopped_answer_has_printed_belongs_to_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped_after(*pieces: str) -> Iterator[str]:
        yield from pieces
        raise KeyboardInterrupt

    model: Any = SimpleNamespace()
    dialog = Dialog(model, "")
    for pieces, kept in (((), ()), (("Hel", "lo"), ("I am Ada", "Hello"))):
        model.answer = lambda _, pieces=pieces: Answer(stopped_after(*pieces))
        with pytest.raises(KeyboardInterrupt):
            dialog.ask("I am Ada")
        assert dialog.messages == messages("", *kept)
    assert capsys.readouterr().out == "\nHello\n"


def test_from_python(run: Path) -> None:
    conversation = messages("", "I am Ada", "Hello Ada", "Who am I?")
    assert titanlite.generate_text(run, messages=conversation) == ["You are Ada 🦊"]
    assert titanlite.generate_text(run, messages=conversation[2:]) == ["I do not know"]
    with pytest.raises(UserError, match="messages: turn 1: its role is missing"):
        titanlite.generate_text(run, messages=[{"content": "x"}])
    with pytest.raises(UserError, match="either prompts or messages"):
        titanlite.generate_text(run, "x", messages=conversation)


def test_a_run_without_a_template_needs_the_option(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r"--chat-template\n.*has no chat template(.|\n)*write the path of a template"
    ):
        main([str(tmp_path / "run"), "--chat", "--prompt", "I am Ada"])
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    template = tmp_path / "template.jinja"
    found = titanlite.generate_text(tmp_path / "run", messages=messages("", "I am Bob"), chat_template=template)
    assert found == ["Hello Bob"]


def test_a_system_message_that_the_template_does_not_write(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("messages %}", "messages if message.role != 'system' %}"))
    with pytest.raises(ConfigError, match=r"--system = 'Shout.'(.|\n)*writes nothing for the role 'system'"):
        main([str(run), "--chat", "--chat-template", str(template), "--prompt", "I am Ada", "--system", SHOUT])
    with pytest.raises(UserError, match="turn 1: the chat template writes nothing for the role 'system'"):
        titanlite.generate_text(run, messages=messages(SHOUT, "I am Ada"), chat_template=template)


def test_the_models_own_sampling_defaults(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options win over generation_config.json, which wins over titanlite's defaults. Each of its ids ends a text."""
    chosen: list[Any] = []

    def generated(*arguments: Any, eos_ids: Collection[int], **_: Any) -> Iterator[list[int]]:
        chosen[:] = [arguments[2], eos_ids]
        yield [ALSO_EOS]

    def sampling(*options: str, **file: Any) -> tuple[Sampling, str]:
        content = json.dumps(file).encode()
        monkeypatch.setattr(SavedRun, "generation_config", lambda _: content)
        main([str(run), "--prompt", "x", *options])
        out, errors = capsys.readouterr()
        assert out == "x\n" or "eos_token_id" not in file
        return chosen[0], errors

    monkeypatch.setattr(command, "generate", generated)
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.3}
    found, errors = sampling(**fields)
    assert found == Sampling(0.5, 7, 0.9)
    assert "Sampling: temperature 0.5, top_k 7, top_p 0.9, the model's own defaults (generation_config.json)" in errors
    assert "generation_config.json is not applied: repetition_penalty = 1.3" in errors
    found, errors = sampling("--temperature", "1.5", "--top-k", "0", **fields)
    assert found == Sampling(1.5, None, 0.9)
    assert "Sampling: top_p 0.9, the model's own" in errors
    assert sampling(do_sample=False)[0] == Sampling(0.0)
    found, errors = sampling(eos_token_id=[ALSO_EOS, 4])
    assert found == Sampling(0.8)
    assert "Sampling" not in errors
    assert {ALSO_EOS, 4} < {*chosen[1]}


def test_an_export_ends_the_turns_that_the_run_has_learned(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, tokenizer = open_run(run), tokenizer_of(run)
    (end,) = {*ChatEncoder(tokenizer).stop_ids} - {tokenizer.eos_id}

    def eos_ids(kind: str, content: bytes | None) -> list[int]:
        config = SimpleNamespace(data=SimpleNamespace(sources=[SourceConfig(kind, "x")]))
        monkeypatch.setattr(SavedRun, "config", config)
        monkeypatch.setattr(SavedRun, "generation_config", lambda _: content)
        found: list[int] = json.loads(generation_json(saved, tokenizer))["eos_token_id"]
        return found

    assert eos_ids("text", None) == tokenizer.eos_id == 0
    assert eos_ids("chat", None) == [end, 0]
    assert eos_ids("chat", b'{"eos_token_id": [7, 0]}') == [end, 7, 0]


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(run: Path, tmp_path: Path) -> None:
    """On a pseudo-terminal. The model's control characters do not reach it."""
    own, theirs = pty.openpty()
    (tmp_path / "slow.py").write_text(SLOW)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), str(run), "--chat"],
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([own], [], [], 60)[0], seen
            seen += os.read(own, 1000).decode(errors="replace")
        seen = seen[seen.index(text) + len(text) :]

    try:
        read_until("Ctrl-D ends]\r\n> ")
        os.write(own, b"I am Ada\n")
        read_until("Hel")
        os.write(own, b"\x03")
        read_until("[stopped; Ctrl-C again ends]\r\n> ")
        os.write(own, b"/reset\n")
        read_until("a new conversation begins]\r\n> ")
        os.write(own, b"two\\\nlines\n")
        read_until("... ")
        read_until(r"\x1b[2J")
        read_until("> ")
        os.write(own, b"\x04")
        assert program.wait(PATIENCE_S) == 0
    finally:
        program.kill()
        program.wait()
        os.close(own)


SLOW = """
import sys, time
from titanlite.generation.generate import Transcript
from titanlite.tools.command import run_command
from titanlite.tools.generate.__main__ import main

answer = Transcript.answer

def slow(*arguments, **keywords):
    for token in answer(*arguments, **keywords):
        yield token
        time.sleep(0.1)

Transcript.answer = slow
run_command(main)
"""
