"""Saving: a checkpoint is written beside its place and gets its name when it is complete, at once or in a thread."""

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint.config import AsyncMode
from titanlite.checkpoint.folder import publish, retain, step_folder, writing_folder
from titanlite.checkpoint.manifest import Manifest, write_manifest
from titanlite.checkpoint.state import HostCopy, first_not_finite, local_part
from titanlite.checkpoint.storage import FileRecord, first_failure, save_tensors, sync_folder
from titanlite.runtime.agreement import RanksError, on_first, together
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

_PROBE = ".probe"
_PATIENCE_S = 10.0
"""So long a network file system may take to show a file to another node."""


@dataclass(frozen=True)
class Retention:
    """As folder.retain; keep: steps that stay in any case."""

    keep_latest_k: int
    keep_every: int
    keep: frozenset[int]


class Saver:
    """Writes checkpoints into `folder`, one at a time; all ranks of `group` call it alike.

    group: of gloo, for saving alone, since a thread uses it. With a mode other than "disabled" the caller goes on once
    its tensors are copied.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup, mode: AsyncMode, retention: Retention) -> None:
        self._folder = folder
        self._group = group
        self._retention = retention
        self._copy = None if mode == "disabled" else HostCopy(pinned=mode == "async_with_pinned_mem")
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a save that ran beside training has failed, as far as this rank knows by now."""
        return self._failure is not None

    def save(self, draft: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Saves now. draft: all but the files. Raises RanksError on all ranks."""
        self.drain()
        self._write(draft, tensors, {name: local_part(tensor) for name, tensor in tensors.items()})

    def begin(self, draft: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Saves in a thread, once the one before has ended; where threads are not wanted, as `save`."""
        if self._copy is None:
            self.save(draft, tensors)
            return
        self.drain()
        copies = self._copy.take({name: local_part(tensor) for name, tensor in tensors.items()})
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(draft, tensors, copies), name="titanlite-save", daemon=True
        )
        self._thread.start()

    def drain(self) -> None:
        """Until no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_failure(self) -> str | None:
        """What went wrong in a thread, once; nothing after that."""
        self.drain()
        failure, self._failure = self._failure, None
        return failure

    def _write_in_thread(self, draft: Manifest, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        try:
            self._write(draft, tensors, copies)
        except Exception as error:
            self._failure = str(error)

    def _write(self, draft: Manifest, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        start = time.perf_counter()
        step, folder = draft.step, self._folder
        try:
            on_first(lambda: _make_empty(writing_folder(folder, step)), self._group)
            self._require_finite(local)
            try:
                mine = save_tensors(writing_folder(folder, step), tensors, local, self._group)
            except dcp.CheckpointException as error:
                raise first_failure(error) from None
            records = {name: record for part in together(lambda: mine, self._group) for name, record in part.items()}
            on_first(lambda: self._publish(replace(draft, files=records)), self._group)
        except RanksError as error:
            if dist.get_rank(self._group) == 0:
                shutil.rmtree(writing_folder(folder, step), ignore_errors=True)
            raise RanksError(f"step {step} could not be saved: {error}") from None
        log.info(
            "Saved step %d in %s: %s, %.2f s",
            step,
            step_folder(folder, step),
            size_of(records),
            time.perf_counter() - start,
        )
        on_first(self._delete_older, self._group)

    def _require_finite(self, local: Mapping[str, Tensor]) -> None:
        for rank, name in enumerate(together(lambda: first_not_finite(local), self._group)):
            if name is not None:
                raise RanksError(f"rank {rank}: {name} has values that are not finite; such a state is never published")

    def _publish(self, manifest: Manifest) -> None:
        write_manifest(writing_folder(self._folder, manifest.step), manifest)
        publish(self._folder, manifest.step)

    def _delete_older(self) -> None:
        kept = self._retention
        try:
            deleted = retain(self._folder, keep_latest_k=kept.keep_latest_k, keep_every=kept.keep_every, keep=kept.keep)
        except OSError as error:  # the checkpoint stands all the same
            log.warning("An older checkpoint could not be deleted: %s", error)
            return
        if deleted:
            log.info("Deleted the checkpoints of steps %s", ", ".join(map(str, deleted)))


def size_of(records: Mapping[str, FileRecord]) -> str:
    """How many files and bytes, for a log line."""
    return f"{len(records)} files, {sum(record.bytes for record in records.values()) / 2**20:,.1f} MiB"


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def probe(folder: Path, needed_bytes: int, group: dist.ProcessGroup) -> None:
    """Writes, syncs and renames a file as a save does, and lets every rank read it; a collective over `group`.

    needed_bytes: of one checkpoint; more has to be free. Raises UserError on all ranks: no permission, no space, or a
    node for which the folder is another one.
    """
    nonce = secrets.token_hex(16)
    key = f"checkpoint.folder: {folder}"
    try:
        nonce = on_first(lambda: _write_probe(folder, nonce), group)
    except RanksError as error:
        raise UserError(f"{key} cannot be written: {error}; choose another job.dump_folder") from None
    try:
        together(lambda: _read_probe(folder, nonce), group)
        free = on_first(lambda: shutil.disk_usage(folder).free, group)
    except RanksError as error:
        raise UserError(
            f"{key} is not the same folder for all ranks: {error}; choose a job.dump_folder that all nodes share"
        ) from None
    finally:
        if dist.get_rank(group) == 0:
            (folder / _PROBE).unlink(missing_ok=True)
    if free < needed_bytes:
        raise UserError(
            f"{key} has {free / 2**20:,.1f} MiB of free space, and a checkpoint of this run takes "
            f"{needed_bytes / 2**20:,.1f} MiB: make room, or choose another job.dump_folder"
        )


def _write_probe(folder: Path, nonce: str) -> str:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)  # else the folder itself could be gone after a loss of power
    temporary = folder / f"{_PROBE}.writing"
    with temporary.open("w") as file:
        file.write(nonce)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / _PROBE)
    sync_folder(folder)
    return nonce


def _read_probe(folder: Path, nonce: str) -> None:
    """Waits a little for what a network file system may show late."""
    host = socket.gethostname()
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found = (folder / _PROBE).read_text()
        except OSError as error:
            found = f"nothing ({error.strerror})"
        if found == nonce:
            return
        if time.monotonic() > end:
            raise UserError(f"on {host}, where rank 0 has just written {nonce}, there is {found}")
        time.sleep(0.1)
