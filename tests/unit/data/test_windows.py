import gzip
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data import ranks
from titanlite.batch import IGNORE_INDEX
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import open_tokens
from titanlite.data.sources.raw_tokens import find_invalid
from titanlite.data.sources.tokens import Tokens
from titanlite.runtime.errors import DataError, Problem, UserError

SEQ_LEN = 10


def source(path: Path, dtype: str = "", epochs: int = -1) -> SourceConfig:
    return SourceConfig(kind="tokens", path=str(path), dtype=dtype, epochs=epochs)  # type: ignore[arg-type]


def check_content(source: SourceConfig, vocab_size: int) -> list[Problem]:
    return Tokens(source).check_content("data.sources.0", vocab_size=vocab_size, needs_documents=False)


def build(
    *sources: SourceConfig, num_streams: int = 2, shuffle: bool = False, document_mask: bool = False, **changes: Any
) -> Loader:
    section = DataConfig(
        num_streams=num_streams, max_piece_bytes=100, shuffle=shuffle, document_mask=document_mask, sources=sources
    )
    return ranks.build(section, None, **{"seq_len": SEQ_LEN, "vocab_size": 5000, "global_batch_size": 2, **changes})


def rows(loader: Loader, steps: int) -> list[tuple[list[int], list[int]]]:
    batches = [batch for _ in range(steps) for batch in loader.next_step()]
    loader.close()
    return [(tokens.tolist(), labels.tolist()) for batch in batches for tokens, labels in zip(*batch[:2], strict=True)]


def window(tokens: np.ndarray, n: int) -> tuple[list[int], list[int]]:
    part = tokens[n * SEQ_LEN : n * SEQ_LEN + SEQ_LEN + 1].tolist()
    return part[:-1], part[1:]


@pytest.mark.parametrize(
    ("dtype", "is_raw"), [("uint8", False), ("int64", False), (">u2", False), ("uint16", True), ("uint32", True)]
)
def test_sequence_n_is_window_n(dtype: str, is_raw: bool, tmp_path: Path) -> None:
    """Raw files are little-endian."""
    tokens, file = np.arange(SEQ_LEN * 20 + 5), tmp_path / ("tokens.bin" if is_raw else "tokens.npy")
    if is_raw:
        tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(file)
    else:
        np.save(file, tokens.astype(dtype))
    assert rows(build(source(file, dtype if is_raw else "")), 25) == [window(tokens, n % 20) for n in range(50)]


def test_windows_do_not_cross_files(tmp_path: Path) -> None:
    first, second = np.arange(25), np.arange(100, 141)
    np.save(tmp_path / "a.npy", first)
    np.save(tmp_path / "b.npy", second)
    loader = build(source(tmp_path))
    assert "6 windows" in loader.description
    assert "4 tokens at the ends of files" in loader.description
    expected = [window(first, 0), window(first, 1), *[window(second, n) for n in range(4)]]
    assert rows(loader, 3) == expected


def test_a_finite_run_trains_on_the_tail(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1, 26))
    loader = build(source(tmp_path / "tokens.npy", epochs=1))
    (*_, last, empty) = rows(loader, 2)
    assert last == ([21, 22, 23, 24, 25, 0, 0, 0, 0, 0], [22, 23, 24, 25, *[IGNORE_INDEX] * 6])
    assert empty == ([0] * 10, [IGNORE_INDEX] * 10)
    assert loader.ended == [True]


def test_each_shuffled_window_occurs_once_per_epoch(tmp_path: Path) -> None:
    tokens = np.arange(SEQ_LEN * 20 + 1)
    np.save(tmp_path / "tokens.npy", tokens)
    found = rows(build(source(tmp_path / "tokens.npy"), shuffle=True), 20)
    expected = [window(tokens, n) for n in range(20)]
    assert found[:20] != expected
    assert sorted(found[:20]) == sorted(found[20:]) == expected
    assert found[:20] != found[20:]


@pytest.mark.parametrize(("wrong", "shown"), [(5000, "5000"), (-1, "-1"), (2**40, str(2**40))])
def test_a_token_outside_the_vocabulary_is_raised_at_its_step(wrong: int, shown: str, tmp_path: Path) -> None:
    tokens = np.arange(SEQ_LEN * 10 + 1)
    tokens[57] = wrong
    np.save(tmp_path / "tokens.npy", tokens)
    loader = build(source(tmp_path / "tokens.npy"))
    loader.next_step()
    loader.next_step()
    with pytest.raises(UserError, match=f"tokens.npy: token {shown} at position 57 is not in the model's vocabulary"):
        loader.next_step()
    loader.close()


def test_find_invalid_handles_unsigned_types() -> None:
    assert find_invalid(np.array([1, 2, 3], np.uint16), 4) is None
    assert find_invalid(np.array([1, 2, 3], np.uint16), 3) == 2
    assert find_invalid(np.array([1, -2, 9], np.int8), 5) == 1
    assert find_invalid(np.array([1, 2**64 - 1], np.uint64), 5) == 1


def test_too_few_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(SEQ_LEN))
    with pytest.raises(UserError, match=r"no data to train on: .*10 tokens, 0 windows.*smaller training.seq_len"):
        build(source(tmp_path / "tokens.npy"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.zeros((2, 3), int), "2-D"),
        (np.zeros(5), "float64"),
        (np.array([{}], object), "not a 1-D array of integers: it is 1-D object"),
        *((content, ".*magic string") for content in (b"", b"PK\x03\x04 an archive", b"\x80\x04]\x94.")),
    ],
)
def test_other_arrays_are_refused(content: np.ndarray | bytes, text: str, tmp_path: Path) -> None:
    """A remedy names titanlite tokenize, and not numpy's option for pickled objects."""
    if isinstance(content, bytes):
        (tmp_path / "tokens.npy").write_bytes(content)
    else:
        np.save(tmp_path / "tokens.npy", content, allow_pickle=True)
    with pytest.raises(UserError, match=text):
        open_tokens(tmp_path / "tokens.npy", "")
    (problem,) = check_content(source(tmp_path), 10)
    has_header = not isinstance(content, bytes) or content.startswith(b"PK")
    assert problem.key == f"data.sources.0.{'path' if has_header else 'dtype'}"
    assert "with titanlite tokenize" in problem.remedy
    assert "pickle" not in problem.remedy


def test_suffixes_are_case_insensitive(tmp_path: Path) -> None:
    tokens = np.arange(SEQ_LEN * 4 + 1)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "tokens.npy").rename(tmp_path / "TOKENS.NPY")
    assert Tokens(source(tmp_path)).check_files("data.sources.0") == []
    assert rows(build(source(tmp_path)), 2) == [window(tokens, n) for n in range(4)]
    (tmp_path / "TOKENS.NPY").rename(tmp_path / "TOKENS.BIN")
    (problem,) = check_content(source(tmp_path), 10**6)
    assert "TOKENS.BIN is a .npy file: rename it to end with .npy" in problem.remedy


def test_the_beginning_of_the_files_is_checked_before_the_run(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(20))
    assert check_content(source(tmp_path), 20) == []
    (problem,) = check_content(source(tmp_path), 19)
    assert "19 at position 19" in problem.remedy
    (tmp_path / "tokens.npy").unlink()
    (tmp_path / "broken.bin").write_bytes(b"123")
    (problem,) = check_content(source(tmp_path, "uint16"), 10**6)
    assert "broken.bin is not a 1-D array of integers" in problem.remedy


def ids_like_text(vocab_size: int) -> Any:
    """Token ids of which low ones are frequent, as in files of text."""
    ranks = np.random.default_rng(0).zipf(1.2, 20_000)
    return ranks[ranks < vocab_size][:6000]


@pytest.mark.parametrize("vocab_size", [300, 2048, 50_257, 65_536, 151_936])
def test_raw_files_of_another_type_are_refused_with_what_helps(vocab_size: int, tmp_path: Path) -> None:
    ids, file = ids_like_text(vocab_size), tmp_path / "tokens.bin"
    for stored in ("<u2", "<u4", "<i8", ">u2", ">u4", ">i8"):
        if vocab_size > 65_536 and stored.endswith("u2"):
            continue
        for read_as in ("uint16", "uint32"):
            ids.astype(stored).tofile(file)
            problems = check_content(source(file, read_as), vocab_size)
            if np.dtype(stored) == read_as:
                assert problems == []
            elif np.dtype(stored).name in ("uint16", "uint32") and stored.startswith("<"):
                assert problems[0].remedy.endswith(f'write dtype = "{np.dtype(stored).name}"')
            else:
                assert np.array_equal(converted(problems[0], vocab_size), ids), (stored, read_as)


def converted(problem: Problem, vocab_size: int) -> Any:
    """The tokens of the file that the command in the remedy writes."""
    command = shlex.split(problem.remedy.partition("convert it with ")[2].rpartition(", and")[0])
    assert command[:2] == ["python", "-c"]
    exec(command[2], {})
    file = Path(problem.remedy.partition(": ")[0]).with_suffix(".npy")
    assert check_content(source(file), vocab_size) == []
    return np.load(file)


@pytest.mark.parametrize("numbers", [256, 2, 4, 128, 1024])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("read_as", ["uint16", "uint32"])
def test_headers_are_named(dtype: str, numbers: int, read_as: str, tmp_path: Path) -> None:
    ids, header = np.tile(ids_like_text(50_257), 20), np.zeros(numbers, "<i4")
    header[:2] = 1, len(ids)
    (tmp_path / "it's.bin").write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    (problem,) = check_content(source(tmp_path, read_as), 65_536)
    assert f"it begins with a header of {4 * numbers} bytes: " in problem.remedy
    assert np.array_equal(converted(problem, 65_536), ids)


def test_an_id_beyond_the_vocabulary_is_named_in_a_file_of_the_right_type(tmp_path: Path) -> None:
    np.append(ids_like_text(50_257), 70_000).astype("uint32").tofile(tmp_path / "tokens.bin")
    (problem,) = check_content(source(tmp_path, "uint32"), 65_536)
    assert "has 70000 at position" in problem.remedy


def test_other_formats_are_named(tmp_path: Path) -> None:
    for data in (b"PK\x03\x04" * 99, gzip.compress(b"tokens" * 99), "naïve text\n".encode() * 99):
        (tmp_path / "tokens.bin").write_bytes(data[: len(data) // 2 * 2])
        (problem,) = check_content(source(tmp_path, "uint16"), 65_536)
        assert re.search("is a zip archive: unpack|is compressed with gzip: unpack|is text: write", problem.remedy)


def test_wider_ids_of_a_tiny_vocabulary_are_named(tmp_path: Path) -> None:
    for stored, read_as in (("<u4", "uint16"), ("<i8", "uint32")):
        ids_like_text(8).astype(stored).tofile(tmp_path / "tokens.bin")
        (problem,) = check_content(source(tmp_path, read_as), 8)
        assert f"its ids have {8 * np.dtype(stored).itemsize} bits" in problem.remedy


def test_raw_files_that_are_right_are_not_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    padded = np.concatenate([np.full(9000, 32_000), ids_like_text(32_000), np.zeros(9000, int)])
    for ids in (
        np.zeros(100),
        np.arange(100),
        np.arange(65_536),
        padded,
        np.arange(5000) % 16,
        np.arange(60_000) % 256,
        np.concatenate([[0x8B1F], padded]),  # begins like a file of gzip
    ):
        for dtype in ("uint16", "uint32"):
            ids.astype(dtype).tofile(file)
            assert check_content(source(file, dtype), 65_536) == [], (ids, dtype)


def test_a_file_that_becomes_shorter_is_an_error_with_its_offset(tmp_path: Path) -> None:
    """Also if the file loses pages: not SIGBUS."""
    np.save(tmp_path / "tokens.npy", np.zeros(SEQ_LEN * 10_000 + 1, np.uint16))
    loader = build(source(tmp_path / "tokens.npy"))
    os.truncate(tmp_path / "tokens.npy", 150)
    message = "tokens.npy became shorter .* it has 150 bytes instead of 200,130, and bytes 148 to 169 are needed"
    with pytest.raises(DataError, match=message) as caught:
        loader.next_step()
    assert caught.value.sequence == 1
    loader.close()


@pytest.mark.parametrize("suffix", ["npy", "documents"])
def test_the_first_step_that_reads_an_overwritten_file_fails(tmp_path: Path, suffix: str) -> None:
    for name in ("first", "second"):
        np.save(tmp_path / f"{name}.npy", np.zeros(SEQ_LEN * 20 + 1, np.uint16))
        with open(tmp_path / f"{name}.documents", "wb") as file:
            np.save(file, np.arange(0, SEQ_LEN * 20, 40))
    loader = build(source(tmp_path), document_mask=True)
    os.utime(tmp_path / f"second.{suffix}", (0, 0))
    for _ in range(10):
        loader.next_step()
    message = rf"second.{suffix} was written while it was in use: it has [\d,]+ bytes, last modified at 1970-01-01"
    with pytest.raises(DataError, match=message) as caught:
        loader.next_step()
    assert caught.value.sequence == 20
    loader.close()


def test_a_source_may_be_added_on_resume(tmp_path: Path) -> None:
    first, second = np.arange(SEQ_LEN * 40 + 1), np.arange(2000, 2000 + SEQ_LEN * 40 + 1)
    np.save(tmp_path / "first.npy", first)
    np.save(tmp_path / "second.npy", second)
    loader = build(source(tmp_path / "first.npy"))
    assert rows(loader, 3) == [window(first, n) for n in range(6)]
    state = loader.state()
    both = build(source(tmp_path / "first.npy"), source(tmp_path / "second.npy"))
    both.load_state(state)
    assert both.describe(state) == f"sequence 6 (tokens {tmp_path / 'first.npy'}: epoch 0)"
    found = rows(both, 10)
    for stream in range(2):
        of_stream = found[stream::2]
        old, new = ([row for row in of_stream if (row[0][0] >= 2000) == added] for added in (False, True))
        assert old == [window(first, 6 + stream + 2 * n) for n in range(len(old))]
        assert new == [window(second, stream + 2 * n) for n in range(len(new))]
        assert old
        assert new
    with pytest.raises(UserError, match="the saved state of the data"):
        build(source(tmp_path / "first.npy")).load_state(both.state())
