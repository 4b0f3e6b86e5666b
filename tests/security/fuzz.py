"""Read mutated files as commands do, each in a process of its own with limits of memory and time.

    python -m tests.security.fuzz --kind arrow --kind parquet --minutes 10 --seed 1

A mutation follows from its kind and seed. It fails if the process crashes, hangs, needs too much memory, or ends with a
traceback. Its files are kept, and `--kind KIND --seed SEED --count 1` repeats it.
"""

import argparse
import faulthandler
import gc
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tests.security.kinds import KINDS, Kind
from tests.security.mutations import mutated

MEMORY_BYTES = 4 * 2**30
"""More than the process has when it begins to read."""
FILE_BYTES = 2**30
TIME_S = 40.0
"""On a busy machine: a valid file takes less than a second."""

OUTPUT, DUMP, CODE, CHANGED = "output.txt", "dump.txt", "code.txt", "changed.txt"
MODULES, FILES = "modules.txt", ".files.txt"
VALID, READ = "valid", "read"
"""Folders."""
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"]+)", line \d+,? in (\w+)')
_ERROR = re.compile(r"^(\w[\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A mutation that ended in another way than it should. reader: the command; file: the changed one. text: traceback
    and output. folder: all of its files."""

    kind: str
    seed: int
    what: str
    reader: str
    file: str
    text: str
    folder: Path

    @property
    def cause(self) -> str:
        """Equal for findings of the same place."""
        frames = [f"{Path(path).stem}.{name}" for path, name in _FRAME.findall(self.text)]
        own = [frame for frame, (path, _) in zip(frames, _FRAME.findall(self.text), strict=True) if "titanlite" in path]
        return " < ".join([re.sub(r"[\d']+", "0", self.what)[:60], *frames[-1:], *own[-2:][::-1]])


@dataclass
class Figures:
    """Of one kind. refused: mutations that ended with a message. findings: by their cause."""

    mutations: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: dict[str, list[Finding]] = field(default_factory=dict)


def fuzz(
    kind: Kind, name: str, seeds: Iterable[int], keep: Path, *, until: float = math.inf, checked: bool = True
) -> Figures:
    """Read mutations of a kind, until a moment of time.monotonic(). keep: an existing folder, for what is found.
    checked: whether to read each valid file before, in a process of its own."""
    figures, begin = Figures(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="titanlite-fuzz-") as text:
        folder = Path(text)
        found = folder / "found.jsonl"

        def work() -> int:
            _build(kind, folder)
            if checked:
                _check(kind, folder)
            _warm_up(kind, folder)
            gc.collect()
            gc.freeze()  # a command does so at its start: in each fork, it would copy the pages of all objects
            with found.open("w") as out:
                for seed in seeds:
                    if time.monotonic() > until:
                        break
                    out.write(json.dumps(_mutation(kind, name, seed, folder, keep)) + "\n")
            return 0

        _wait(_start(work, folder), None)
        if not (folder / CODE).exists():
            raise RuntimeError(f"{name}: valid files cannot be built and read:\n{_output(folder)[-5000:]}")
        for line in found.read_text().splitlines():
            row = json.loads(line)
            figures.mutations += 1
            figures.refused += row["code"] in (1, 2) and not row["what"]
            if row["what"]:
                finding = Finding(
                    name, **{key: row[key] for key in row if key != "code"} | {"folder": Path(row["folder"])}
                )
                figures.findings.setdefault(finding.cause, []).append(finding)
    figures.seconds = time.monotonic() - begin
    return figures


# Valid files are built and checked in other processes, since a fork of one that has trained may wait forever for its
# threads. This process imports what they have imported.


def _build(kind: Kind, folder: Path) -> None:
    """Build the valid files in `folder`/VALID. They are always read in `folder`/READ: some have the path of others."""
    os.environ |= {"TITANLITE_CACHE": "cache", "TOKENIZERS_PARALLELISM": "false"}
    (folder / READ).mkdir()

    def build() -> int:
        os.chdir(folder / READ)
        kind.build()
        shutil.rmtree("cache", ignore_errors=True)
        return 0

    _succeed(build, folder / "build")
    (folder / READ).rename(folder / VALID)


def _check(kind: Kind, folder: Path) -> None:
    """Read each valid file, and with each reader. Raises RuntimeError if one is refused."""
    number, files = 0, [""]

    def read() -> int:
        os.chdir(folder / READ)
        kind.before()
        files = _files(kind)
        code = kind.readers[number % len(kind.readers)](files[number % len(files)])
        (folder / READ / FILES).write_text("\n".join(files))
        return code

    while number < max(len(files), len(kind.readers)):
        shutil.copytree(folder / VALID, folder / READ)
        _succeed(read, folder / f"valid-{number}")
        files = (folder / READ / FILES).read_text().split("\n")
        shutil.rmtree(folder / READ)
        number += 1


def _warm_up(kind: Kind, folder: Path) -> None:
    """Call the readers that do not train once in this process: the first call takes longer."""
    for reader in kind.readers:
        if not reader.trains:
            shutil.copytree(folder / VALID, folder / READ)
            os.chdir(folder / READ)
            kind.before()
            reader(_files(kind)[0])
            os.chdir(folder)
            shutil.rmtree(folder / READ)


def _succeed(function: Callable[[], int], place: Path) -> None:
    """Call the function in a new process, and import what it has imported."""
    place.mkdir()

    def work() -> int:
        code = function()
        (place / MODULES).write_text("\n".join(sys.modules))
        return code

    _, code = _wait(_start(work, place), None)
    code = _code(place, code)
    if code or not (place / MODULES).exists():
        raise RuntimeError(f"exit code {code}:\n{_output(place)[-5000:]}")
    for name in (place / MODULES).read_text().split():
        with suppress(Exception):  # modules that programs have made
            importlib.import_module(name)
    shutil.rmtree(place)


def _files(kind: Kind) -> list[str]:
    found = sorted({str(path) for pattern in kind.files for path in Path().glob(pattern) if path.is_file()})
    assert found, f"no file of {kind.files} in {os.getcwd()}"
    return found


def _mutation(kind: Kind, name: str, seed: int, folder: Path, keep: Path) -> dict[str, Any]:
    """Read one mutation in a new process; returns its exit code, and what is found."""
    rng = Random(f"{name} {seed}")
    reader = rng.choice(kind.readers)
    place = folder / str(seed)
    place.mkdir()
    shutil.copytree(folder / VALID, folder / READ)

    def work() -> int:
        os.chdir(folder / READ)
        kind.before()
        file = rng.choice(_files(kind))
        (place / CHANGED).write_text(file)
        path = Path(file)
        path.write_bytes(mutated(rng, file, path.read_bytes()))
        kind.after(file)
        _limit(place)
        return reader(file) or 0

    signaled, code = _wait(_start(work, place), TIME_S + 20)
    code, text = _code(place, code), _output(place)
    dump = (place / DUMP).read_text(errors="replace") if (place / DUMP).exists() else ""
    what = ""
    if "Timeout" in dump:
        what = f"more than {TIME_S:g} s"
    elif signaled:
        what = signal.Signals(signaled).name
    elif _TRACEBACK in text or "panicked at" in text:
        what = (_ERROR.findall(text) or ["a traceback"])[-1]
    elif code not in (0, 1, 2):
        what = f"exit code {code}"
    kept = place
    if what:
        kept = keep / name / str(seed)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept)
        shutil.copytree(folder / READ, kept / READ, symlinks=True)
    file = (place / CHANGED).read_text() if (place / CHANGED).exists() else ""
    shutil.rmtree(place)
    shutil.rmtree(folder / READ)
    facts = {"seed": seed, "code": code, "what": what, "reader": str(reader), "file": file, "folder": str(kept)}
    return facts | {"text": (dump + text)[-20_000:] if what else ""}


def _limit(place: Path) -> None:
    """Limit this process, and write its stacks if it crashes or takes too long."""
    used = int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dump = (place / DUMP).open("w")
    faulthandler.enable(dump)
    faulthandler.dump_traceback_later(TIME_S, exit=True, file=dump)


def _start(function: Callable[[], int], folder: Path) -> int:
    """Start a process that calls the function, with its output and code in files of the folder."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads, from Python 3.12 on
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        descriptor = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
        code = function()
        (folder / CODE).write_text(str(int(code)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(pid: int, timeout_s: float | None) -> tuple[int, int]:
    """Wait for a process of _start; returns the signal that ended it, or 0, and its exit code."""
    end = time.monotonic() + (timeout_s or 0)
    while timeout_s is not None and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return _end(status)
        time.sleep(0.002)
    if timeout_s is not None:
        os.killpg(pid, signal.SIGKILL)
    return _end(os.waitpid(pid, 0)[1])


def _end(status: int) -> tuple[int, int]:
    return (os.WTERMSIG(status), 0) if os.WIFSIGNALED(status) else (0, os.WEXITSTATUS(status))


def _code(folder: Path, exited: int) -> int:
    """The code that the function of a process has returned, or its exit code, if it has ended the process itself."""
    path = folder / CODE
    return int(path.read_text()) if path.exists() else exited


def _output(folder: Path) -> str:
    path = folder / OUTPUT
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> int:
    """Print a line per kind, and what is found; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="of files; default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="in total, of all kinds")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, help="mutations of each kind, at most")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder of what is found")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    keep = options.keep.resolve()
    names = options.kind or [*KINDS]
    end, total, causes = time.monotonic() + 60 * options.minutes, 0, 0
    print("kind              mutations  refused  seconds  findings", flush=True)
    for number, name in enumerate(names):
        seeds = count(options.seed) if options.count is None else range(options.seed, options.seed + options.count)
        share = (end - time.monotonic()) / (len(names) - number)
        found = fuzz(KINDS[name], name, seeds, keep, until=time.monotonic() + share)
        facts = f"{found.mutations:>9,}  {found.refused:>7,}  {found.seconds:>7.0f}  {len(found.findings):>8}"
        print(f"{name:<16}  {facts}", flush=True)
        for cause, each in found.findings.items():
            first = each[0]
            print(
                f"  {len(each)} x {cause}\n    seed {first.seed}: {first.reader}, {first.file}; {first.folder}",
                flush=True,
            )
        total, causes = total + found.mutations, causes + len(found.findings)
    print(f"{total:,} mutations, {causes} findings")
    return int(bool(causes))


if __name__ == "__main__":
    sys.exit(main())
