"""What a process does to the files of a folder, one operation at a time, and what can happen to it there."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.listdir", "os.scandir"}
Act = Callable[[str, str, int], None]
"""Called before an operation with its name, the path (relative to the folder) and the descriptor, -1 for a name."""


def watch(folder: Path, act: Act) -> None:
    """From now on, for the whole process, and for good: what is audited (open, rename, …) and fsync.

    A file that is to be synced is an operation more before that, "written": it may be torn there; and so is one
    that has been, "fsynced".
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
            return  # of an open descriptor, or elsewhere
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


class Noted:
    """Remembers the operations, and ends the process at the one with the given number, from 0."""

    def __init__(self, kill_at: int = -1) -> None:
        self.names: list[str] = []
        self._kill_at = kill_at

    def __call__(self, operation: str, name: str, descriptor: int) -> None:
        if len(self.names) == self._kill_at:
            if operation == "written":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(f"{operation} {name}")
