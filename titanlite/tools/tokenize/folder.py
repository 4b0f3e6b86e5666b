"""The folder of token files: local, or in an object store. Files appear complete or not at all."""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from titanlite.data.sources.tokens import MANIFEST, UNFINISHED
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.runtime.cache import cache_folder, locked
from titanlite.runtime.durability import PARTIAL, appears_complete, publish, replace_file
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address, place
from titanlite.storage.store import Store, in_parallel
from titanlite.tools.outputs import cannot_write

COPIED_BYTES = 2**23


class LocalFolder:
    """A folder of a file system, which all workers see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> set[str]:
        """Names of the files directly in the folder, without incomplete ones; empty if it does not exist."""
        with suppress(FileNotFoundError):
            return {file.name for file in self.path.iterdir() if file.suffix != PARTIAL}
        return set()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return (self.path / name).read_bytes()

    def read_all(self, names: Iterable[str]) -> list[bytes]:
        return [self.read(name) for name in names]

    def write(self, name: str, content: bytes) -> None:
        replace_file(self.path / name, content, self.temporary(name))

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist: the folder is locked."""
        self.write(name, content)

    def temporary(self, name: str) -> Path:
        """A new path for a file that is being written: several processes may write the same file."""
        return self.path / f"{name}-{uuid.uuid4().hex[:8]}{PARTIAL}"

    def publish(self, temporary: Path, name: str) -> None:
        """Give a complete file its name."""
        publish(temporary, self.path / name)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, and those that killed processes have left incomplete."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        for left in self.path.glob(f"*{PARTIAL}"):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)

    def add_tokenizer(self, tokenizer: Tokenizer) -> None:
        if TOKENIZER_FOLDER not in self.names():
            with appears_complete(self.path / TOKENIZER_FOLDER, self.temporary(TOKENIZER_FOLDER)) as kept:
                tokenizer.save(kept)

    def open_tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path / TOKENIZER_FOLDER / "tokenizer.json")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Create and lock the folder for one command; remove it again if nothing was written. Raises UserError."""
        with errors_of_writing(self):
            self.path.mkdir(parents=True, exist_ok=True)
            with self._locked():
                _require_unfinished(self, self.names())
                try:
                    yield
                finally:
                    if not any(self.path.iterdir()):
                        self.path.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which the system releases if the process dies. Raises UserError."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes into {self.path}: wait for it, or choose another --out") from None
        else:
            yield
        finally:
            os.close(descriptor)


class StoredFolder:
    """Objects below an address. Files are written in the cache folder first."""

    def __init__(self, address: Address) -> None:
        self._store = Store(address)

    def __str__(self) -> str:
        return str(self._store.address)

    def names(self) -> set[str]:
        return set(self._store.children())

    def read(self, name: str) -> bytes:
        return self._store.read(name)

    def read_all(self, names: Iterable[str]) -> list[bytes]:
        return in_parallel(self.read, names)

    def write(self, name: str, content: bytes) -> None:
        self._store.write(name, content)

    def create(self, name: str, content: bytes) -> None:
        """Write an object that does not exist. Raises UserError if another process writes another one."""
        try:
            self._store.create(name, content)
        except FileExistsError:
            raise UserError(f"another command has started to write into {self}: choose another --out") from None

    def temporary(self, name: str) -> Path:
        return cache_folder() / name

    def publish(self, temporary: Path, name: str) -> None:
        with temporary.open("rb") as file, self._store.writer(name) as upload:
            while content := file.read(COPIED_BYTES):
                upload.write(content)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and what killed processes have uploaded of incomplete ones, which costs space."""
        self._store.delete(names)
        with suppress(UserError):  # these credentials may not list uploads
            self._store.abort_uploads()

    def add_tokenizer(self, tokenizer: Tokenizer) -> None:
        with tempfile.TemporaryDirectory() as kept:
            tokenizer.save(Path(kept))
            for file in Path(kept).rglob("*"):
                if file.is_file():
                    self.write(f"{TOKENIZER_FOLDER}/{file.relative_to(kept)}", file.read_bytes())

    def open_tokenizer(self) -> Tokenizer:
        with tempfile.TemporaryDirectory() as copy:
            for name in self._store.list(TOKENIZER_FOLDER):
                self._store.copy_to(Path(copy), name)
            return Tokenizer(Path(copy) / TOKENIZER_FOLDER / "tokenizer.json")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nothing is locked: commands with the same plan write the same objects."""
        _require_unfinished(self, self.names())
        yield


OutputFolder = LocalFolder | StoredFolder


def output_folder(text: str) -> OutputFolder:
    """The folder that --out names. Raises UserError."""
    out = place(text)
    return StoredFolder(out) if isinstance(out, Address) else LocalFolder(out)


@contextmanager
def errors_of_writing(out: OutputFolder) -> Iterator[None]:
    """Raise UserError for an OSError of the folder. A pipe that is closed is that of stdout."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if isinstance(out, LocalFolder):
            raise cannot_write(out.path, error) from error
        raise UserError(
            f"cannot write {out}, or its copy in the cache folder {cache_folder()}: {error.strerror or error}; set the "
            "environment variable TITANLITE_CACHE to a folder with more space, or choose another --out"
        ) from error


def _require_unfinished(out: OutputFolder, names: set[str]) -> None:
    """Raise UserError if the folder has other files than those of an interrupted command."""
    if names and UNFINISHED not in names:
        what = "is complete" if MANIFEST in names else "has other files"
        raise UserError(f"{out} {what} and is not overwritten: remove it, or choose another --out")


@contextmanager
def scratch_cache() -> Iterator[None]:
    """Let this process use a cache folder of its own, which is removed at the end: what it unpacks and indexes is of no
    use to others. Those of killed processes are removed first. Raises UserError."""
    parent = cache_folder() / "scratch"
    with ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with locked(parent.with_suffix(".lock"), "make a scratch folder"):  # none is removed before it is locked
                for left in parent.iterdir():
                    _remove_if_left(left)
                scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True))
                descriptor = os.open(scratch, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            remedy = "set the environment variable TITANLITE_CACHE to a folder that is writable and supports file locks"
            raise UserError(f"cannot make a folder in {parent}: {error}; {remedy}") from error
        before = os.environ.get("TITANLITE_CACHE")
        os.environ["TITANLITE_CACHE"] = scratch
        try:
            yield
        finally:
            del os.environ["TITANLITE_CACHE"]
            os.environ |= {} if before is None else {"TITANLITE_CACHE": before}


def _remove_if_left(folder: Path) -> None:
    """Remove a scratch folder if no process holds its lock."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
