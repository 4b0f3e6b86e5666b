"""Data: what nodes fetch of token files in a store, and the memory of the order of many sources.

The store counts requests and has zeros. Each node has a cache of its own, with room for the blocks that its streams mix
at a time.
"""

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from benchmarks.growth.count import Count
from titanlite.data import order
from titanlite.data.config import DataConfig
from titanlite.data.corpus import TextCorpus
from titanlite.data.order import IndexedPieces, Permutation
from titanlite.data.preparation import Assignment, open_order
from titanlite.data.segments import BLOCK_TOKENS, MIN_STREAM_BLOCKS, Segments
from titanlite.data.sources import stored
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.stored import Listing, StoredFile
from titanlite.data.sources.tokens import Tokens
from titanlite.data.steps import BatchStage
from titanlite.runtime.cache import Recent
from titanlite.storage.address import Address
from titanlite.storage.store import Facts, Store

SEQ_LEN, STREAMS, FILES = 2**18, 512, 4
FILE_TOKENS = MIN_STREAM_BLOCKS * STREAMS * BLOCK_TOKENS * 9 // (8 * FILES) + 12_345
"""Somewhat more than blocks of full size need: segments begin and end inside of blocks."""

SOURCES_STREAMS = 16
"""Streams of a process."""


class Fetched(NamedTuple):
    """Of an epoch: all bytes, those of the files, and requests."""

    bytes: int
    corpus: int
    requests: int


class _Objects(Listing):
    """A listing of `files` objects of `size` bytes."""

    def __init__(self, files: int, size: int) -> None:
        self.base, self.is_folder = Address.parse("s3://bucket/corpus"), True
        names = [self.base / f"{number}.bin" for number in range(files)]
        self._facts = {name: Facts(size, "etag") for name in names}
        self.files = [StoredFile(name, self) for name in names]

    def facts(self, address: Address) -> Facts | None:
        return self._facts.get(address)


class _Cache:
    """The parts of one node in memory."""

    fetched_bytes, fetch_s = 0, 0.0

    def __init__(self, room: int) -> None:
        self._parts: Recent[str, bytes] = Recent(room, len)

    def get(self, facts: Any, size: int, make: Any) -> bytes:
        found = self._parts.get(str(facts), make)
        assert len(found) == size
        return found


@lru_cache(8)
def _zeros(length: int) -> bytes:
    return bytes(length)


@contextmanager
def _counting_store(objects: Listing) -> Iterator[list[int]]:
    """Context with the bytes of each request, 0 for the facts of an object."""
    requests: list[int] = []

    def read_range(_: Store, _name: str, _start: int, length: int) -> bytes:
        requests.append(length)
        return _zeros(length)

    def facts(store: Store) -> Facts:
        requests.append(0)
        found = objects.facts(store.address)
        assert found is not None
        return found

    with ExitStack() as patches:
        for patched in (
            patch.object(Store, "read_range", read_range),
            patch.object(Store, "facts", facts),
            patch.object(StoredFile, "prepare", lambda *_: None),  # threads would fetch in another order
            patch.object(stored, "BLOCKS_AHEAD", 0),
        ):
            patches.enter_context(patched)
        yield requests


def fetched(nodes: int, version: int, *, seq_len: int, num_streams: int, files: int, file_tokens: int) -> Fetched:
    """What `nodes` nodes fetch in an epoch, each by its streams in turn, without what a start reads of each file."""
    config = SourceConfig(kind="tokens", path="s3://bucket/corpus", dtype="uint16", epochs=1)
    section = DataConfig(num_streams=num_streams, document_mask=False, stream_version=version, sources=(config,))
    assignment = Assignment(section, None, 1, (BatchStage(1, num_streams, seq_len),))
    objects = _Objects(files, 2 * file_tokens)
    source = Tokens(config)
    source.listing = objects
    windows = Segments(files * file_tokens // seq_len, (), num_streams=num_streams, seq_len=seq_len)
    of_stream = 2 * seq_len * (3 * windows.open_windows // 2 + 2 * windows.block)  # the largest group, and two ends
    total, count = 0, 0
    with _counting_store(objects) as requests:
        for node in range(nodes):
            own = range(node, num_streams, nodes)
            cache = _Cache(room=len(own) * of_stream)
            with patch.object(stored, "stored_parts", lambda cache=cache: cache):
                opened = open_order(source, 0, assignment, None)
                streams = [opened.pieces(stream) for stream in own]
                places = [stream.first() for stream in streams]
                requests.clear()
                while not all(stream.has_ended(place) for stream, place in zip(streams, places, strict=True)):
                    for number, stream in enumerate(streams):
                        if not stream.has_ended(places[number]):
                            found = stream.fetch(places[number], seq_len)
                            assert not isinstance(found, Exception), found
                            places[number] = stream.after(places[number])
                total, count = total + sum(requests), count + len(requests)
    return Fetched(total, 2 * file_tokens * files, count)


def of_stored_tokens(nodes: int) -> Iterator[Count]:
    """An epoch of shuffled token files in a store: `ranks` is the number of nodes."""
    part = "shuffled token files in a store, of nodes"
    found = fetched(nodes, 4, seq_len=SEQ_LEN, num_streams=STREAMS, files=FILES, file_tokens=FILE_TOKENS)
    yield Count(part, nodes, "bytes / corpus", found.bytes / found.corpus)
    yield Count(part, nodes, "requests / MiB", found.requests * 2**20 / found.bytes)


class _Numbers:
    """A corpus that is not read."""

    windows = False

    def __init__(self, count: int) -> None:
        self.count = count


def order_bytes(sources: int, *, count: int, num_streams: int, own_streams: int, places: int) -> int:
    """The most memory that the orders of `sources` sources take, of streams of which each is in another block."""
    tracemalloc.start()
    try:
        order._tables = order._Tables()
        for number in range(sources):
            corpus = cast(TextCorpus, _Numbers(count))
            permutation = Permutation(count, (0, number))
            streams = [
                IndexedPieces(corpus, permutation, stream, num_streams=num_streams, name="", epochs=-1)
                for stream in range(own_streams)
            ]
            for stream, pieces in enumerate(streams):
                place = pieces.first()._replace(position=stream * (count // own_streams) // num_streams * num_streams)
                for _ in range(places):
                    pieces.number(place)
                    place = pieces.after(place)
            _kept.append(streams)
        return tracemalloc.get_traced_memory()[1]
    finally:
        _kept.clear()
        tracemalloc.stop()


_kept: list[Sequence[IndexedPieces]] = []


def of_sources(sources: int) -> Iterator[Count]:
    """The block orders of a process: `ranks` is the number of sources."""
    most = order_bytes(sources, count=10**8, num_streams=1024, own_streams=SOURCES_STREAMS, places=2)
    yield Count("orders of pieces, of sources", sources, "MB", most / 1e6)
