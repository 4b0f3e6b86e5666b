"""What the start of a rank asks of the TCPStore and of the data files, counted as titanlite's own functions run."""

import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from titanlite.assembly.data_files import looks_of
from titanlite.assembly.facts import content_facts
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_source
from titanlite.data.kinds import open_source
from titanlite.data.loader import build_loader
from titanlite.data.sources.token_table import TABLE_FILES, use_looks
from titanlite.data.sources.tokens import Tokens, opened_once
from titanlite.ranks.agreement import require_equal, share_from_rank
from titanlite.ranks.distributed import World
from titanlite.ranks.network import agree_on_attempt
from titanlite.runtime.errors import ConfigError

MOST_OPENS, MOST_OPENS_OF_FEW = 5, 7
"""Of a token file, by the first rank of a node (docs/cluster.md, How large); of few files, which have no table, by each
rank."""
_TIMEOUT_S = 1


class OthersStore(dist.Store):
    """The store of a job whose other ranks have already written what the functions of a start wait for.

    requests, keys: of this rank, as torch's client sends them: a read waits for its keys first.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._values = rank, dict[str, bytes]()
        self._of_rank_0 = json.dumps({"result": [[0, size]]}).encode()  # all ranks in one group: see require_equal
        self.requests = self.keys = 0

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._note([key])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._note(keys, requests=2)
        return [self._value(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._note(keys)
        return True

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_TIMEOUT_S)) -> None:  # noqa: ARG002
        self._note(keys)

    def has_extended_api(self) -> bool:
        return True

    def _note(self, keys: Sequence[str], requests: int = 1) -> None:
        self.requests += requests
        self.keys += len(keys)

    def _value(self, key: str) -> bytes:
        folder, _, name = key.rpartition("/")
        own = self._values.get(key) or self._values.get(f"{folder}/{self._rank}")
        if own is None and folder.endswith(("asks", "answer")):
            own = uuid.UUID(int=int(name) if name.isdecimal() else 0).hex.encode()
        return own or self._of_rank_0


def requests_of(world: World) -> tuple[int, int]:
    """Requests to the TCPStore, and keys in them, from the launch to the first process group."""
    if world.size == 1:
        return 0, 0
    store = OthersStore(world.rank, world.size)
    named = dist.PrefixStore(agree_on_attempt(store, world.rank, world.size, _TIMEOUT_S), store)
    share_from_rank(world.local_ranks.start, "data files", list, world, named, _TIMEOUT_S)
    for name in ("program", "content"):
        require_equal(name, {}, world, named, _TIMEOUT_S)
    return store.requests, store.keys


def planned_requests(world: World) -> int:
    """By the law of docs/cluster.md: linear in ranks on rank 0, constant on the others."""
    if world.size == 1:
        return 0
    of_data = 4 if world.local_rank == 0 else 3
    return 5 * (world.size - 1) + 2 * 8 + of_data if world.rank == 0 else 5 + 2 * 4 + of_data


def files_of(config: JobConfig) -> tuple[int, JobConfig | None]:
    """(files of the data on this machine, the configuration with those sources of token files that have some)."""
    here = [each for each in config.data.sources if each.path and not open_source(each).is_stored]
    counts = [len(open_source(each).files()) for each in here]
    tokens = tuple(each for each, count in zip(here, counts, strict=True) if count and each.kind == Tokens.kind)
    section = replace(config.data, sources=tokens, num_workers=0)
    of_tokens = replace(config, data=section, validation=replace(config.validation, enable=False))
    return sum(counts), of_tokens if tokens else None


def opens_of(config: JobConfig, *, is_first: bool) -> tuple[int, int]:
    """(token files, how often they are opened until the first step). Other data is opened when its index is built or
    read. config: see files_of. is_first: of a node, which looks at the files for its other ranks. Raises UserError.
    """
    files = {str(file) for each in config.data.sources for file in open_source(each).files()}
    with _new_cache(), _counted(files) as opens:
        try:
            with opened_once():
                _check(config)
                looks = looks_of(config)
            if not is_first:  # the look was that of another process
                opens.clear()
                use_looks(looks)
                _check(config)
            use_looks(looks)
            _read_facts(config)
        finally:
            use_looks([])
    return len(files), len(opens)


def planned_opens(files: int, *, is_first: bool) -> int:
    """The most that docs/cluster.md allows."""
    if files <= TABLE_FILES:
        return MOST_OPENS_OF_FEW * files
    return MOST_OPENS * files if is_first else 0


def _check(config: JobConfig) -> None:
    vocab_size = config.hyper_parameters.vocab_size
    for number, source in enumerate(config.data.sources):
        key = f"data.sources.{number}"
        if problems := check_source(source, key, config.data, vocab_size=vocab_size, checks_files=True):
            raise ConfigError(problems)


def _read_facts(config: JobConfig) -> None:
    """What a start computes of the files."""
    sizes = config.training
    loader = build_loader(
        config.data,
        None,
        seq_len=sizes.seq_len,
        vocab_size=config.hyper_parameters.vocab_size,
        global_batch_size=config.data.num_streams,
        local_batch_size=1,
        data_rank=0,
        data_degree=1,
    )
    try:
        content_facts(config, None, loader.sources, [], [])
    finally:
        loader.close()


@contextmanager
def _new_cache() -> Iterator[None]:
    """An empty cache folder, as on a node that has not read the files before."""
    name = "TITANLITE_CACHE"
    with TemporaryDirectory() as folder:
        before, os.environ[name] = os.environ.get(name), folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


_opens: list[tuple[set[str], list[str]]] = []
"""Files that are watched, and what is opened of them."""


@contextmanager
def _counted(files: set[str]) -> Iterator[list[str]]:
    """The opens of these files."""
    found = list[str]()
    if not hasattr(_note, "is_installed"):
        sys.addaudithook(_note)  # cannot be removed
        _note.is_installed = True  # type: ignore[attr-defined]
    _opens.append((files, found))
    try:
        yield found
    finally:
        _opens.pop()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opens and str(arguments[0]) in _opens[-1][0]:
        _opens[-1][1].append(str(arguments[0]))
