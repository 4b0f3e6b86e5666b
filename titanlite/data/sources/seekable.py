"""Readers for pyarrow of what is no open file: their position."""

import io


class SeekableReader(io.RawIOBase):
    """The part of a file of `size` bytes that is the same for all readers. Subclasses read at `position`, which may be
    outside of the file."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position
