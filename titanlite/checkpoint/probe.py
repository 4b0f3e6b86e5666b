"""Whether checkpoints can be written, before a step is trained: by all ranks, into one and the same folder."""

import os
import secrets
import shutil
import socket
import time
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint.storage import sync_folder
from titanlite.runtime.agreement import RanksError, on_first, together
from titanlite.runtime.errors import UserError

_PROBE = ".probe"
_PATIENCE_S = 10.0


def probe(folder: Path, needed_bytes: int, group: dist.ProcessGroup) -> None:
    """Writes, syncs and renames a file as a save does, and lets every rank read it; a collective over `group`.

    needed_bytes: of one checkpoint; more has to be free. Raises UserError on all ranks: no permission, no space, or a
    node for which the folder is another one.
    """
    nonce = secrets.token_hex(16)
    key = f"checkpoint.folder: {folder}"
    try:
        nonce = on_first(lambda: _write(folder, nonce), group)
    except RanksError as error:
        raise UserError(f"{key} cannot be written: {error}; choose another job.dump_folder") from None
    try:
        together(lambda: _read(folder, nonce), group)
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


def _write(folder: Path, nonce: str) -> str:
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


def _read(folder: Path, nonce: str) -> None:
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
