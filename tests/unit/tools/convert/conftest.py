"""Fixtures of the command's tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanlite.data.bpe import train_bpe
from titanlite.runtime.logging import log

TEXT = "the model reads what it is given, and says it again\n"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def _own_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the logger, which the command configures for its process."""
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    before = (log.handlers[:], log.level, log.propagate)
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with fewer tokens than the tiny models' 400, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter([TEXT] * 4), 280, folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
