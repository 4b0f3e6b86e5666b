"""titanlite generate --chat, with a small model that has learned a few conversations by heart."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch.nn import functional

import titanlite
from titanlite.data.bpe import train_bpe
from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.kv_cache import Reading
from titanlite.hf.safetensors import write_tensors
from titanlite.models.init import init_parameters_
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.logging import log
from titanlite.tools.convert.__main__ import main as convert
from titanlite.tools.generate.__main__ import main

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
    ("", "two\nlines", "\x1b[2J", "go on", "a\nb"),
)
MAX_SEQ_LEN = 160


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
    init_parameters_(model, 1, partial(LLAMA3.init, config))
    encoded = ChatEncoder(tokenizer).encode([messages(*each) for each in CONVERSATIONS], "assistant")
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
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 301], "do_sample": False}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLITE_CACHE", str(folder / "cache"))
        convert(["import", str(folder), "--out", str(folder / "run")])
    return folder / "run"


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


Said = Callable[..., str]


@pytest.fixture
def said(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """said(stdin, *arguments): stdout of the command."""

    def call(stdin: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        main([str(run), "--chat", *arguments])
        return capsys.readouterr().out

    return call


def test_answers_depend_on_the_history(said: Said) -> None:
    for _, *texts in CONVERSATIONS[:3]:
        assert said("".join(f"{text}\n" for text in texts[::2])) == "".join(f"{text}\n" for text in texts[1::2])
    assert said("I am Ada\n\n/reset\nWho am I?\n/help\n") == "Hello Ada\nI do not know\n"
    assert said("two\\\nlines\ngo on") == "\x1b[2J\na\nb\n"
    assert said("") == ""


def test_messages_as_options(said: Said, tmp_path: Path) -> None:
    (tmp_path / "second.txt").write_text("Who am I?\n")
    file = str(tmp_path / "second.txt")
    assert said("/reset", "--prompt", "I am Bob", "--prompt-file", file) == "Hello Bob\nYou are Bob\n"
    assert said("", "--prompt", "I am Ada", "--system", SHOUT) == "HELLO ADA\n"
