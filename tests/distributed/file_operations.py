"""Record a process's file operations in a folder, and inject faults into them."""

import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_NAMED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.listdir", "os.scandir"}
Act = Callable[[str, str, int], None]
"""Called before an operation with its name, its path (relative to the folder) and its descriptor (-1 if absent)."""


def watch(folder: Path, act: Act) -> None:
    """Call `act` before each audited operation (open, rename, …) and fsync in `folder` until the process ends.

    An fsync of a file is preceded by an operation "written", at which a fault may truncate the file. Each fsync is
    followed by an operation "fsynced".
    """
    root = f"{folder}"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" and event not in _NAMED:
            return
        path = args[0]
        if isinstance(path, os.PathLike | bytes):
            path = os.fsdecode(path)
        if isinstance(path, str) and path.startswith(root):
            name = os.path.relpath(path, root)
        elif event == "open" and (not isinstance(path, str) or args[1] is not None or os.path.isabs(path)):
            return  # opens a descriptor, or is outside the folder
        elif isinstance(path, str) and os.path.isabs(path):
            return
        else:
            name = f"…/{path}"  # relative to a descriptor: rmtree
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            event = "create"
        elif event == "os.rename":
            name += f" -> {os.path.basename(args[1])}"
        act(event.removeprefix("os."), name, -1)

    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.startswith(root):
            fsync(descriptor)
            return
        name = os.path.relpath(path, root)
        if not os.path.isdir(path):
            act("written", name, descriptor)
        act("fsync", name, descriptor)
        fsync(descriptor)
        act("fsynced", name, descriptor)

    os.fsync = watched_fsync
    sys.addaudithook(hook)


@dataclass(frozen=True)
class Fault:
    """A fault that occurs once on one rank.

    at: number of the operation, from 0. For a full disk: size in bytes beyond which writes to `file` fail. Unused for
    non-finite values. error: errno that the operation raises; 0 raises a RuntimeError.
    """

    kind: Literal["kill", "error", "full disk", "not finite"]
    rank: int = 0
    at: int = -1
    error: int = 0
    file: str = ""


class FaultPoints:
    """Record this process's file operations in a folder, and inject one fault at a time."""

    def __init__(self, root: Path) -> None:
        self.operations: list[str] = []
        self._fault: Fault | None = None
        self._limited = ""
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        watch(root, self._act)

    def arm(self, fault: Fault | None) -> None:
        """Clear the recorded operations and set the next fault. None removes a previous fault."""
        self._make_room()
        self.operations, self._fault = [], fault

    def _make_room(self) -> None:
        if self._limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._soft, self._hard))
            self._limited = ""

    def _act(self, operation: str, name: str, descriptor: int) -> None:
        if name != self._limited:
            self._make_room()
        number, fault = len(self.operations), self._fault
        self.operations.append(f"{operation} {name}")
        if fault is None:
            return
        if fault.kind == "full disk":
            if operation == "create" and name.endswith(fault.file):
                self._fault = None
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, self._hard))
                self._limited = name
        elif fault.at == number:
            self._fault = None
            if fault.kind == "kill":
                if operation == "written" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.error:
                raise OSError(fault.error, os.strerror(fault.error), name)
            raise RuntimeError("the writer has failed")


def one_of_each(operations: list[str], *kinds: str) -> Iterator[int]:
    """Yield the number of the middle operation of each kind. kinds: by default all that occur."""
    for kind in kinds or sorted({operation.split()[0] for operation in operations}):
        found = [number for number, operation in enumerate(operations) if operation.split()[0] == kind]
        yield found[len(found) // 2]
