"""Fixtures of the data tests."""

import functools
from pathlib import Path

import pytest

from tests.unit.data.conversations import TEMPLATE
from titanlite.data.sources import hf
from titanlite.data.tokenizer import Tokenizer


@pytest.fixture
def hugging_face_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of `datasets` in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def cached_hub_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache `hf.hub_files`, which the many loaders of a test call for the same dataset."""
    monkeypatch.setattr(hf, "hub_files", functools.cache(hf.hub_files))


@pytest.fixture
def chat_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> Tokenizer:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return Tokenizer(tokenizer_folder / "tokenizer.json", chat_template=str(tmp_path / "template.jinja"))
