"""MANIFEST.json round-trips, and corruption and newer formats are detected."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.unit.checkpoint.making import a_manifest
from titanlite.checkpoint.manifest import (
    FORMAT_VERSION,
    GRID_FORMAT_VERSION,
    MANIFEST_FILE,
    METADATA_FILE,
    Branch,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    read_manifest,
    write_manifest,
)

ZEROS = "0" * 32
COUNTS = {"tokens_seen": 1, "skipped_steps": 0, "by_source": {}, "interval": [0.0, 0.0]}


def full_manifest() -> Manifest:
    """A manifest with all fields set, non-ASCII text and extreme numbers."""
    files = {METADATA_FILE: b"meta", "__0_0.distcp": b"", "__1_0.distcp": b"tensors"}
    return a_manifest(
        10,
        files,
        lineage=(Branch("a1", 0), Branch("b2", 5)),
        counts={"tokens_seen": 2**62, "skipped_steps": 0, "by_source": {"a": [1.0]}, "interval": [0.5, 2.0]},
        facts={"model": {"dim": 8, "eps": 1e-5, "tie": False}, "tokenizer": None, "seq": [1, "\u4e2d", []]},
        config={"job": {"description": f'{ZEROS} quo"te \\ \n \u00e4 \U0001f642'}, "optimizer": {"lr": 0.1 + 0.2}},
        versions={"titanlite": "1"},
    )


def small() -> Manifest:
    return a_manifest(3, {METADATA_FILE: b"m"})


def raw(folder: Path) -> bytes:
    return (folder / MANIFEST_FILE).read_bytes()


def replace(folder: Path, data: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(data)


@pytest.mark.parametrize("content", ["full", "model"])
def test_round_trip(tmp_path: Path, content: str) -> None:
    manifest = Manifest(**{**vars(full_manifest()), "content": content})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


def test_text_like_the_hash_placeholder_round_trips(tmp_path: Path) -> None:
    manifest = a_manifest(1, {METADATA_FILE: b"m"}, facts={ZEROS: ZEROS}, config={"hash": {"xxh3-128": ZEROS}})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert raw(tmp_path).count(ZEROS.encode()) == 3


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    write_manifest(tmp_path, full_manifest())
    content = json.loads(raw(tmp_path))
    assert list(content.pop("hash")) == ["xxh3-128"]
    for record in content["files"].values():
        record["parts"] = []
    optional = {"digest": "", "computations": [], "attempt": ""}
    assert content | optional == json.loads(json.dumps(asdict(full_manifest())))


def test_an_existing_manifest_is_not_overwritten(tmp_path: Path) -> None:
    write_manifest(tmp_path, small())
    with pytest.raises(FileExistsError):
        write_manifest(tmp_path, full_manifest())
    assert read_manifest(tmp_path) == small()


def assert_corrupted(folder: Path, data: bytes) -> None:
    replace(folder, data)
    with pytest.raises(InvalidCheckpointError, match=r"^MANIFEST\.json [^\n]*$"):
        read_manifest(folder)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_flipped_bits_are_detected(stride: int, tmp_path: Path) -> None:
    """With stride 1, of all bits of all bytes; else of every third one."""
    write_manifest(tmp_path, small())
    data = raw(tmp_path)
    for place in range(len(data)):
        for bit in range(place % stride, 8, stride):
            assert_corrupted(tmp_path, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    write_manifest(tmp_path, small())
    data = raw(tmp_path)
    for length in range(len(data)):
        assert_corrupted(tmp_path, data[:length])
        assert_corrupted(tmp_path, data[:length] + bytes(len(data) - length))


@pytest.mark.parametrize("more", [b"\n", b" ", b"\0", b"{}", b"x", b"\xff", bytes(4096)])
def test_extra_bytes_are_detected(tmp_path: Path, more: bytes) -> None:
    write_manifest(tmp_path, small())
    data = raw(tmp_path)
    assert_corrupted(tmp_path, data + more)
    assert_corrupted(tmp_path, more + data)


def test_changed_encoding_and_formatting_are_detected(tmp_path: Path) -> None:
    write_manifest(tmp_path, small())
    data = raw(tmp_path)
    assert_corrupted(tmp_path, b"\xef\xbb\xbf" + data)
    assert_corrupted(tmp_path, data.replace(b"\n", b"\r\n"))
    assert_corrupted(tmp_path, json.dumps(json.loads(data)).encode())


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"3", b'"text"', b"{}", b'{"hash": {}}', b'{"hash": "xxh3-128"}', b'{"hash": null}'),
        *(b'{"hash": {"xxh3-128": ""}}', b'{"hash": {"xxh3-128": null}}', b'{"hash": {"xxh3-128": ["a"]}}'),
        *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"hash": {"xxh3-128": "' + b"0" * 32 + b'"}}'),
    ],
    ids=lambda data: data[:30].decode(),
)
def test_other_json_and_invalid_json_are_detected(tmp_path: Path, data: bytes) -> None:
    assert_corrupted(tmp_path, data)


def test_a_missing_manifest_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"^MANIFEST\.json is missing$"):
        read_manifest(tmp_path)
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        read_manifest(tmp_path / "no folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        read_manifest(tmp_path / "file")
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        read_manifest(tmp_path)


def test_a_permission_error_is_not_reported_as_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, small())

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("titanlite.checkpoint.manifest.read_regular", refuse)
    with pytest.raises(PermissionError):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(GRID_FORMAT_VERSION + 1, "a newer titanlite"), (FORMAT_VERSION - 1, "the titanlite that wrote it")],
)
def test_another_format_is_not_reported_as_corruption(version: int, remedy: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, a_manifest(3, {METADATA_FILE: b"m"}, format=version))
    with pytest.raises(UnknownFormatError, match=rf"is {version}, .* {GRID_FORMAT_VERSION} only: use {remedy}"):
        read_manifest(tmp_path)


def test_a_newer_format_with_other_keys_is_recognized(tmp_path: Path) -> None:
    write_manifest(tmp_path, a_manifest(3, {}, format=GRID_FORMAT_VERSION + 1, lineage=(), counts=None))
    with pytest.raises(UnknownFormatError):
        read_manifest(tmp_path)


def test_a_manifest_without_the_metadata_file_is_invalid(tmp_path: Path) -> None:
    write_manifest(tmp_path, a_manifest(3, {"__0_0.distcp": b"tensors"}))
    with pytest.raises(InvalidCheckpointError, match=r"does not list \.metadata"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../../x", "/etc/hostname", "a/b", "..", ".", "", "a\0b", "a\\b", "a\nb", "\x1bb"])
@pytest.mark.parametrize("where", ["file", "attempt", "branch"])
def test_only_plain_names_are_files_of_a_checkpoint(tmp_path: Path, name: str, where: str) -> None:
    """The id of a branch becomes a part of a name, too: its checkpoints are renamed once the run goes back."""
    names: dict[str, Any] = {"attempt": {"attempt": name}, "branch": {"lineage": (Branch(name, 0),)}}
    files = {METADATA_FILE: b"m", **({name: b"x"} if where == "file" else {})}
    write_manifest(tmp_path, a_manifest(3, files, **names.get(where, {})))
    if (where, name) == ("attempt", ""):
        assert not read_manifest(tmp_path).attempt  # it has none
        return
    with pytest.raises(InvalidCheckpointError, match=r"it lists '.*', which is not the plain name of a file"):
        read_manifest(tmp_path)


def test_a_manifest_without_a_branch_is_invalid(tmp_path: Path) -> None:
    write_manifest(tmp_path, a_manifest(3, {METADATA_FILE: b"m"}, lineage=()))
    with pytest.raises(InvalidCheckpointError, match="it has no lineage"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "3"}, {"lineage": [{"id": "a"}]}, {"files": {METADATA_FILE: {"rank": 0}}}, {"config": []}),
        *({"counts": {"tokens_seen": "xxx", "skipped_steps": 0}}, {"counts": {"tokens_seen": 1}}),
        *({"counts": COUNTS | {"skipped_steps": 10**400}}, {"counts": COUNTS | {"tokens_seen": -1}}),
        *({"counts": COUNTS | {"interval": []}}, {"counts": COUNTS | {"interval": [1.0] * 3}}),
        *({"facts": {"data": "x"}}, {"facts": {"data": {"sources": 1.5}}}, {"facts": {"data": {"sources": ["x"]}}}),
        *({"facts": {"model": 1}}, {"config": {"job": {"plugins": "x"}}}, {"config": {"job": {"plugins": [1]}}}),
        *(
            {"facts": {"stages": []}},
            {"facts": {"stages": {"a": {}}}},
            {"facts": {"stages": {"a": {"from_step": "x"}}}},
        ),
        *({"config": {"model": {"overrides": "x"}}}, {"config": {"model": 3}}),
        *({"config": {"data": {"sources": {}}}}, {"config": {"data": {"sources": ["x"]}}}),
    ],
)
def test_content_with_other_types_is_corrupted(tmp_path: Path, change: dict[str, object]) -> None:
    """The hash is right: a program with a mistake wrote it."""
    text = json.dumps(asdict(small()) | change | {"hash": {"xxh3-128": ZEROS}}, indent=1) + "\n"
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    assert_corrupted(tmp_path, text.replace(ZEROS, digest).encode())


@pytest.mark.timeout(10)
def test_a_pipe_or_a_device_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_FILE)
    with pytest.raises(InvalidCheckpointError, match="is not a regular file"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    (tmp_path / MANIFEST_FILE).symlink_to("/dev/zero")
    with pytest.raises(InvalidCheckpointError, match="is not a regular file"):
        read_manifest(tmp_path)


def test_the_model_of_a_manifest_is_that_of_its_step() -> None:
    """Stages that have begun have changed the rotary embeddings, as far as the family has them."""
    unset = {"seq_len": -1, "weights": {}, "rope_theta": -1.0, "rope_scaling_factor": -1.0, "rope_beta_fast": -1}
    rows = [{"from_step": 3, "rope_theta": 5e4}, {"from_step": 5, "rope_scaling_factor": 4.0, "rope_beta_fast": 9.0}]
    config = {"training": {"stages": [unset | row for row in rows]}}
    model = {"family": "llama3", "dim": 8, "rope_theta": 1e4, "rope_scaling_factor": 1.0}
    for step, changed in ((2, {}), (3, {"rope_theta": 5e4}), (9, {"rope_theta": 5e4, "rope_scaling_factor": 4.0})):
        found = a_manifest(step, {}, facts={"model": model}, config=config)
        assert found.model == model | changed
        assert found.facts["model"] == model
    assert a_manifest(9, {}, facts={"model": model}).model == model


@pytest.mark.parametrize("stages", [{}, [3], [{}], [{"from_step": "3"}], [{"from_step": 3, "rope_theta": "1"}]])
def test_stages_of_another_form_are_invalid(tmp_path: Path, stages: Any) -> None:
    write_manifest(tmp_path, a_manifest(3, {METADATA_FILE: b"m"}, config={"training": {"stages": stages}}))
    with pytest.raises(InvalidCheckpointError, match=r"training\.stages is not a list of tables with a first step"):
        read_manifest(tmp_path)
