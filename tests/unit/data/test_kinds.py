"""Inferring the kind of a source from its file names."""

from pathlib import Path

import pytest

from titanlite.data.kinds import source_from_path
from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.errors import Problem


@pytest.mark.parametrize(
    ("names", "path", "kind"),
    [
        (["a.txt"], "a.txt", "text"),
        (["a.MD"], "a.MD", "text"),
        (["a.jsonl.gz", "b.txt"], "*.gz", "jsonl"),
        (["a.json.gz", "b.json.gz"], ".", "jsonl"),
        (["a.jsonl.zst", "b.ndjson.zst", "c.json.zst"], ".", "jsonl"),
        (["below/a.parquet"], ".", "parquet"),
        (["a.npy"], "*", "tokens"),
        (["tokens.json", "tokens-00000.npy", "notes.txt"], ".", "tokens"),
    ],
)
def test_kind(tmp_path: Path, names: list[str], path: str, kind: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = source_from_path(str(tmp_path / path), "--data")
    assert isinstance(found, SourceConfig)
    assert (found.kind, found.path) == (kind, str(tmp_path / path))


def test_no_kind_or_several(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.rst"):
        (tmp_path / name).touch()
    for path, reason in ((".", "text and jsonl"), ("*", "text and jsonl"), ("c.rst", "no known"), ("d.txt", "matches")):
        found = source_from_path(str(tmp_path / path), "--data")
        assert isinstance(found, Problem)
        assert (found.key, found.value) == ("--data", str(tmp_path / path))
        assert reason in found.rule
