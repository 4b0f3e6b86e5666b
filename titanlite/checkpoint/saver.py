"""Save checkpoints, synchronously or in a thread: write to a temporary folder, then publish it by a rename; in a store,
write objects, then publish them by a manifest."""

import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint import objects
from titanlite.checkpoint.config import AsyncMode
from titanlite.checkpoint.folder import begin, discard, publish, step_folder
from titanlite.checkpoint.manifest import (
    FORMAT_VERSION,
    GRID_FILE,
    GRID_FORMAT_VERSION,
    FileRecord,
    Manifest,
    write_manifest,
    write_recorded,
)
from titanlite.checkpoint.planning import PlannedSaves
from titanlite.checkpoint.state import HostCopy, first_not_finite
from titanlite.checkpoint.storage import first_failure, save_tensors
from titanlite.ranks.agreement import RanksError, describe_failure, gather_on_rank_0, run_on_all_ranks, run_on_rank_0
from titanlite.runtime.durability import replace_file, sync_path
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.runtime.text import counted
from titanlite.runtime.torch_internals import local_part
from titanlite.runtime.waiting import waiting
from titanlite.storage.address import Address, Place

_PROBE = ".probe"
_VISIBILITY_TIMEOUT_S = 10.0
"""Time for a network file system to make a file visible on other nodes."""


class Saver:
    """Writes checkpoints into `folder`, one at a time; its methods are collectives over `group` unless noted.

    group: a gloo group that nothing else uses during a save, since a thread uses it. With a mode other than "disabled",
    `begin` returns once the tensors are copied, or with "async_with_pinned_mem" once the copies are enqueued: the
    tensors must not change before `hold_copies`. device: of the tensors. delete_older: called on rank 0 after each
    save; returns the deleted steps. small_files: name -> content of further files of each checkpoint.
    """

    def __init__(
        self,
        folder: Place,
        group: dist.ProcessGroup,
        mode: AsyncMode,
        device: torch.device,
        delete_older: Callable[[], list[int]],
        small_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._folder = folder
        self._group = group
        self._device = device
        self._retain = delete_older
        self._saves = PlannedSaves()
        self._small_files = small_files or {}
        self._copy = None if mode == "disabled" else HostCopy(pinned=mode == "async_with_pinned_mem")
        self._thread: threading.Thread | None = None
        self._failure: RanksError | RuntimeError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a save in a thread has failed on this rank by now. Not a collective."""
        return self._failure is not None

    def save(self, draft: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Save synchronously. draft: the manifest without files. Raises RanksError on all ranks."""
        self.drain()
        self._write(draft, tensors, {name: local_part(tensor) for name, tensor in tensors.items()})

    def begin(self, draft: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Save in a thread once the previous save has ended; like `save` if the mode is "disabled"."""
        if self._copy is None:
            self.save(draft, tensors)
            return
        self.drain()
        copies = self._copy.begin({name: local_part(tensor) for name, tensor in tensors.items()})
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(draft, tensors, copies), name="titanlite-save", daemon=True
        )
        self._thread.start()

    def hold_copies(self) -> None:
        """Let the device finish the copies of a save before what is launched next. Not a collective."""
        if self._copy is not None:
            self._copy.hold()

    def drain(self) -> None:
        """Wait for a save in progress. Not a collective."""
        if self._thread is not None:
            with waiting(lambda: "the save in progress: a slow disk, or another rank, whose log tells"):
                self._thread.join()
            self._thread = None

    def take_failure(self) -> str | None:
        """Wait for a save in progress, then return and clear the error of a failed thread; None if no save failed.

        Raises RuntimeError if the save failed without agreement of all ranks: no other save can follow.
        """
        self.drain()
        failure, self._failure = self._failure, None
        if isinstance(failure, RuntimeError):
            raise failure
        return None if failure is None else str(failure)

    def _write_in_thread(self, draft: Manifest, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        assert self._copy is not None
        try:
            if self._device.type == "cuda":
                # A new thread has GPU 0, on which DCP would start a context.
                torch.cuda.set_device(self._device)
            self._copy.wait()
            self._write(draft, tensors, copies)
        except RanksError as error:
            self._failure = error
        except Exception as error:  # a lost connection, or an error outside of run_on_all_ranks
            self._failure = RuntimeError(f"cannot save step {draft.step}: {describe_failure(error)}")
            self._failure.__cause__ = error

    def _write(self, draft: Manifest, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        start = time.perf_counter()
        step, folder = draft.step, self._folder
        writing: Place | None = None
        try:
            writing = place = run_on_rank_0(lambda: begin(folder, step), self._group)
            self._require_finite(local)
            try:
                mine = save_tensors(place, tensors, local, self._group, saves=self._saves)
            except dcp.CheckpointException as error:
                raise first_failure(error) from None
            parts = gather_on_rank_0(mine, self._group)
            records = {name: record for part in parts for name, record in part.items()}
            run_on_rank_0(lambda: self._publish(place, replace(draft, files=records)), self._group)
        except RanksError as error:
            if writing is not None and dist.get_rank(self._group) == 0:
                discard(writing)
            raise RanksError(f"cannot save step {step}: {error}") from None
        if dist.get_rank(self._group) == 0:  # the only one that knows the files of all
            seconds = time.perf_counter() - start
            log.info("Saved step %d in %s: %s, %.2f s", step, step_folder(folder, step), size_of(records), seconds)
        run_on_rank_0(self._delete_older, self._group)

    def _require_finite(self, local: Mapping[str, Tensor]) -> None:
        for rank, name in enumerate(run_on_all_ranks(lambda: first_not_finite(local), self._group)):
            if name is not None:
                raise RanksError(f"rank {rank}: {name} has NaN or infinite values; such a state is never published")

    def _publish(self, writing: Place, manifest: Manifest) -> None:
        small = {name: write_recorded(writing / name, content) for name, content in self._small_files.items()}
        form = GRID_FORMAT_VERSION if GRID_FILE in manifest.files else FORMAT_VERSION
        manifest = replace(manifest, files={**manifest.files, **small}, format=form)
        if isinstance(writing, Address):
            objects.publish(writing, manifest)
        else:
            write_manifest(writing, manifest)
            publish(writing.parent, manifest.step)

    def _delete_older(self) -> None:
        try:
            deleted = self._retain()
        except (OSError, UserError) as error:  # the new checkpoint is published already
            log.warning("Cannot delete an older checkpoint: %s", error)
            return
        if deleted:
            log.info("Deleted the checkpoints of steps %s", ", ".join(map(str, deleted)))


def size_of(records: Mapping[str, FileRecord]) -> str:
    """Format number and total size of files, for a log line."""
    return f"{counted(len(records), 'file')}, {sum(record.bytes for record in records.values()) / 2**20:,.1f} MiB"


def probe(folder: Path, needed_bytes: int, group: dist.ProcessGroup) -> None:
    """Write, sync and rename a file as a save does, and read it on every rank. A collective over `group`.

    needed_bytes: size of one checkpoint. Raises RanksError if rank 0 cannot write, if less space is free,
    or if a node does not share the folder.
    """
    key = f"checkpoint.folder: {folder}"
    try:
        nonce = run_on_rank_0(lambda: _write_probe(folder, secrets.token_hex(16)), group)
    except RanksError as error:
        raise RanksError(f"{key} cannot be written: {error}; fix this, or choose another job.dump_folder") from None
    try:
        run_on_all_ranks(lambda: _read_probe(folder, nonce), group)
        free = run_on_rank_0(lambda: shutil.disk_usage(folder).free, group)
    except RanksError as error:
        raise RanksError(
            f"{key} is not the same folder for all ranks: {error}; choose a job.dump_folder that all nodes share"
        ) from None
    finally:
        if dist.get_rank(group) == 0:
            (folder / _PROBE).unlink(missing_ok=True)
    if free < needed_bytes:
        raise RanksError(
            f"{key} has {free / 2**20:,.1f} MiB of free space, but a checkpoint of this run needs "
            f"{needed_bytes / 2**20:,.1f} MiB: free space, or choose another job.dump_folder"
        )


def _write_probe(folder: Path, nonce: str) -> str:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync_path(folder.parent)  # else the folder could be lost in a power failure
    replace_file(folder / _PROBE, nonce.encode())
    return nonce


def _read_probe(folder: Path, nonce: str) -> None:
    """Wait until this node reads `nonce` from rank 0's file. Raises UserError after _VISIBILITY_TIMEOUT_S."""
    host = socket.gethostname()
    end = time.monotonic() + _VISIBILITY_TIMEOUT_S
    while True:
        try:
            found = (folder / _PROBE).read_text()
        except OSError as error:
            found = f"nothing ({error.strerror})"
        if found == nonce:
            return
        if time.monotonic() > end:
            raise UserError(f"host {host} reads {found}, but rank 0 wrote {nonce}")
        time.sleep(0.1)
