"""The dump folder of a run, for the commands that read its small files; or its copy in a store."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from titanlite.config.load import CONFIG_COPY
from titanlite.metrics.config import METRICS_FILE
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import MAX_BYTES
from titanlite.storage.address import Place
from titanlite.storage.store import Store, in_parallel

_SUFFIXES = {".toml", ".json", ".jsonl"}
_REMEDY = (
    "set the environment variable TMPDIR to a folder with more space, or copy the run into a folder yourself and pass "
    "that"
)


@contextmanager
def local_dump_folder(path: Place, *subfolders: str) -> Iterator[Path]:
    """Context with the folder at `path`; of an address, with a temporary copy of its small files, whose times are
    unknown (0), and of those in `subfolders`. Raises UserError if it is no dump folder."""
    if isinstance(path, Path):
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: pass the dump folder of a run")
        names = {CONFIG_COPY, METRICS_FILE} & set(os.listdir(path))
    else:
        store = Store(path)
        sizes = {name: of.bytes for name, of in store.children().items() if of and Path(name).suffix in _SUFFIXES}
        names = {*sizes}
    if not {CONFIG_COPY, METRICS_FILE} & names:
        checkpoints = "" if isinstance(path, Path) else "; checkpoint.folder in a store has only checkpoints"
        raise UserError(
            f"{path} has neither {METRICS_FILE} nor {CONFIG_COPY}: pass the dump folder of a run{checkpoints}"
        )
    if isinstance(path, Path):
        yield path
        return
    sizes |= {name: of.bytes for each in subfolders for name, of in store.list(each).items()}
    with TemporaryDirectory(prefix="titanlite-") as folder:
        _require_space(path, sum(sizes.values()), folder)

        def copy(name: str) -> None:
            most = max(2 * sizes[name], MAX_BYTES)  # it may grow meanwhile
            os.utime(store.copy_to(Path(folder), name, most), (0, 0))

        try:
            in_parallel(copy, sizes)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} was deleted while it was copied: run the command again") from None
        except OSError as error:
            raise UserError(f"cannot copy the files of {path} to {folder}: {error.strerror}: {_REMEDY}") from None
        yield Path(folder)


def _require_space(path: Place, num_bytes: int, folder: str) -> None:
    """Raise UserError if a copy would take more than half of the free space."""
    if num_bytes > (free := shutil.disk_usage(folder).free) // 2:
        raise UserError(
            f"the files of {path} to copy have {num_bytes / 2**30:,.1f} GiB, and {folder} has {free / 2**30:,.1f} GiB "
            f"of free space: {_REMEDY}"
        )
