"""Faults that the content of raw token files shows: they contain no type, so ids may be read as another one."""

import codecs
import shlex
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.stored import SourceFile, StoredFile, size_of


def find_invalid(tokens: npt.NDArray[np.integer], vocab_size: int) -> int | None:
    """Position of the first token id outside the vocabulary; None if all are valid."""
    if not len(tokens) or (tokens.max() < vocab_size and (tokens.dtype.kind == "u" or tokens.min() >= 0)):
        return None
    ids = tokens.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    return int(wrong[0]) if len(wrong) else None


def raw_fault(file: SourceFile, sample: npt.NDArray[np.unsignedinteger], vocab_size: int) -> str:
    """What shows that a raw file is not of the dtype it is read as, with the remedy; "" if nothing does.

    sample: its beginning, uint16 or uint32.
    """
    raw, skipped = sample.tobytes(), 0
    if fault := content_fault(file, raw):
        return fault
    if header := _header(raw, size_of(file), 0 if sample.dtype == np.uint16 else vocab_size):
        found, dtype, skipped = header
    else:
        found, dtype = _other_type(sample, vocab_size)
    if not found:
        return ""
    if (own := {"<u2": "uint16", "<u4": "uint32"}.get(dtype)) and not skipped:
        return f'{file}: {found}: write dtype = "{own}"'
    wanted = "uint16" if dtype.endswith("u2") else "uint32"
    read = f"numpy.fromfile({str(file)!r}, {dtype!r}, offset={skipped})"
    converted = file.with_suffix(".ids.npy" if file.suffix.lower() == ".npy" else ".npy")
    code = f"import numpy; numpy.save({str(converted)!r}, {read}.astype({wanted!r}))"
    if isinstance(file, StoredFile):
        code = code.replace(f"{file.parent}/", "")
        return f"{file}: {found}: convert a local copy with python -c {shlex.quote(code)}, and replace it by that"
    return f"{file}: {found}: convert it with python -c {shlex.quote(code)}, and remove it"


def content_fault(file: SourceFile, raw: bytes) -> str:
    """What shows that a file does not consist of token ids, with the remedy; "" if nothing does. raw: its beginning."""
    if what := next((what for magic, what in _MAGICS.items() if raw.startswith(magic)), ""):
        return f"{file} is {what}, or write token files with titanlite tokenize"
    if len(raw) >= _MIN_SAMPLE and _is_text(raw):
        return f"{file} is text: write token files with titanlite tokenize, or read it with another kind"
    return ""


def _is_text(raw: bytes) -> bool:
    """Whether all bytes are those of UTF-8; the last character may be incomplete."""
    with suppress(UnicodeDecodeError):
        return all(each.isprintable() or each.isspace() for each in codecs.getincrementaldecoder("utf-8")().decode(raw))
    return False


def _header(raw: bytes, size: int, min_tokens: int) -> tuple[str, str, int] | None:
    """(description, type of the ids, its bytes) of a header; None if there is none.

    It has the number of the tokens that follow, among its first numbers of 32 bits. size: of the file, in bytes.
    min_tokens: a smaller number may be an id.
    """
    fields = np.frombuffer(raw[: len(raw) // 4 * 4], "<u4").tolist()
    for skipped in _HEADERS:
        for dtype in ("<u2", "<u4"):
            count, rest = divmod(size - skipped, np.dtype(dtype).itemsize)
            if count >= max(min_tokens, _MIN_SAMPLE) and not rest and count in fields[: min(8, skipped // 4)]:
                return f"it begins with a header of {skipped} bytes", dtype, skipped
    return None


def _other_type(sample: npt.NDArray[np.unsignedinteger], vocab_size: int) -> tuple[str, str]:
    """What shows that a sample is of another type, and the type; ("", "") if nothing does.

    In ids of twice the size or more, every other element is 0, or for vocabularies above 65,536 a small number. The
    order of bytes is judged for uint16 only: in uint32, most ids of the other order are in no vocabulary. The upper
    bytes of the distinct ids of a text vary less than the lower ones: low ids are used more.
    """
    if len(sample) < _MIN_SAMPLE or not sample.any():
        return "", ""
    is_uint16, columns, ids = (
        sample.dtype == np.uint16,
        sample[: len(sample) // 4 * 4].reshape(-1, 4),
        np.unique(sample),
    )
    if is_uint16 and not columns[:, 2:].any() and columns[:, 1].max() < _FEW:
        return "its ids have 64 bits", "<u8"
    if is_uint16 and not columns[:, :2].any() and columns[:, 2].byteswap().max() < _FEW:
        return "its ids have 64 bits, in big-endian order", ">u8"
    if (most := columns[:, 1::2].max()) < _FEW and (columns[:, ::2] >= (_FEW if most else 1)).mean() > 0.05:
        return ("its ids have 32 bits", "<u4") if is_uint16 else ("its ids have 64 bits", "<u8")
    if is_uint16 and columns[:, ::2].byteswap().max() < _FEW and (columns[:, 1::2] >= _FEW).mean() > 0.05:
        return "its ids have 32 bits, in big-endian order", ">u4"
    if not is_uint16 and find_invalid(sample, vocab_size) is not None:
        found, dtype = _other_type(halves := sample.view(np.uint16), vocab_size)
        if not found and find_invalid(halves, vocab_size) is None:
            return "its ids have 16 bits", "<u2"
        return ("", "") if dtype == "<u4" else (found, dtype)
    if is_uint16 and len(ids) >= _MIN_SAMPLE and _entropy(ids & 255) + 1 < _entropy(ids >> 8):
        fits = find_invalid(sample.byteswap(), vocab_size) is None
        return ("its bytes are in big-endian order", ">u2") if fits else ("", "")
    return "", ""


def _entropy(values: npt.NDArray[np.integer]) -> float:
    """In bits, of the distribution of the values, bytes."""
    counts = np.bincount(values)
    shares = counts[counts > 0] / len(values)
    return float(-(shares * np.log2(shares)).sum())


_HEADERS = (4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096)
"""Usual sizes of headers, in bytes."""
_MAGICS = {
    b"\x93NUMPY": "a .npy file: rename it to end with .npy",
    b"\x1f\x8b\x08": "compressed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x89HDF": "an HDF5 file: convert it",
}
_MIN_SAMPLE, _FEW = 64, 16
