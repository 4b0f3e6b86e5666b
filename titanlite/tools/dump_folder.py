"""The dump folder of a run, for the commands that read its small files; or its copy in a store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from titanlite.config.load import CONFIG_COPY
from titanlite.metrics.config import METRICS_FILE
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Place
from titanlite.storage.store import Store, in_parallel

_SUFFIXES = {".toml", ".json", ".jsonl"}


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
        names = {name for name in store.children() if Path(name).suffix in _SUFFIXES}
    if not {CONFIG_COPY, METRICS_FILE} & names:
        checkpoints = "" if isinstance(path, Path) else "; checkpoint.folder in a store has only checkpoints"
        raise UserError(
            f"{path} has neither {METRICS_FILE} nor {CONFIG_COPY}: pass the dump folder of a run{checkpoints}"
        )
    if isinstance(path, Path):
        yield path
        return
    names |= {name for each in subfolders for name in store.list(each)}
    with TemporaryDirectory(prefix="titanlite-") as folder:

        def copy(name: str) -> None:
            os.utime(store.copy_to(Path(folder), name), (0, 0))

        try:
            in_parallel(copy, names)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} was deleted while it was copied: run the command again") from None
        except OSError as error:
            raise UserError(
                f"cannot copy the files of {path} to {folder}: {error.strerror}: set the environment variable TMPDIR "
                "to a folder with more space, or copy the run into a folder yourself and pass that"
            ) from None
        yield Path(folder)
