"""Mutated files of each kind that commands read: none crashes the interpreter, hangs, or ends with a traceback.

`python -m tests.security.fuzz` reads as many as an hour has time for.
"""

import ctypes
import os
import threading
import time
from pathlib import Path
from random import Random

import pytest

from tests.security import fuzz
from tests.security.kinds import KINDS, Call, Kind
from tests.security.mutations import MUTATIONS, mutated
from titanlite.runtime.errors import UserError

QUICK = ("jsonl", "arrow", "tokenizer", "lock")
"""Kinds whose valid files are made and read in a second or less."""


def write_number() -> None:
    Path("number.txt").write_text("0")


def refuse(_: str) -> None:
    raise UserError("not a number")


def crash(_: str) -> None:
    ctypes.string_at(0)


def fail(_: str) -> None:
    raise KeyError("planted")


def fail_in_thread(_: str) -> None:
    thread = threading.Thread(target=fail, args=("",))
    thread.start()
    thread.join()


def hang(_: str) -> None:
    time.sleep(60)


def fill_memory(_: str) -> None:
    bytearray(8 * fuzz.MEMORY_BYTES)


def leave(_: str) -> None:
    os._exit(9)


PLANTED = {
    refuse: "",
    crash: "SIGSEGV",
    fail: "KeyError: 'planted'",
    fail_in_thread: "KeyError: 'planted'",
    hang: "more than 1 s",
    fill_memory: "MemoryError",
    leave: "exit code 9",
}


def only_mutations(function: object) -> Call:
    """A reader that calls the function on changed files only: valid ones must be readable."""

    def read(file: str) -> None:
        if Path(file).read_bytes() != b"0":
            function(file)  # type: ignore[operator]

    return Call(read)


@pytest.mark.slow
@pytest.mark.parametrize("function", PLANTED, ids=lambda function: function.__name__)
def test_a_planted_fault_is_found(function: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TIME_S", 1.0)
    kind = Kind(write_number, ("number.txt",), (only_mutations(function),))
    found = fuzz.fuzz(kind, "planted", range(1), tmp_path, checked=False)
    assert found.mutations == 1
    assert [finding.what for each in found.findings.values() for finding in each] == [
        *filter(None, [PLANTED[function]])
    ]
    assert found.refused == (function is refuse)
    kept = [*tmp_path.rglob("number.txt")]
    assert [path.read_bytes() != b"0" for path in kept] == [True] * (function is not refuse)


def test_a_seed_gives_the_same_changed_file() -> None:
    content = b'{"a": [1, 2, {"b": "text"}], "c": null}\n' * 3
    for suffix in (".jsonl", ".json", ".toml", ""):
        every = [mutated(Random(seed), f"x{suffix}", content) for seed in range(200)]
        assert every == [mutated(Random(seed), f"x{suffix}", content) for seed in range(200)]
        assert content not in every
        assert len({*every}) > 100
    assert MUTATIONS.keys() >= {".json", ".toml", ".npz", ".safetensors", ".metadata"}


def check(name: str, found: fuzz.Figures) -> None:
    lines = [f"{len(each)} x {cause}, in {each[0].folder}\n{each[0].text}" for cause, each in found.findings.items()]
    repeats = f"python -m tests.security.fuzz --kind {name} --count 1 --seed SEED, the last name of the folder"
    assert not lines, f"{repeats}, repeats it:\n" + "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_few_mutations_are_read_or_refused(name: str, tmp_path: Path) -> None:
    found = fuzz.fuzz(KINDS[name], name, range(3), tmp_path, checked=False)
    assert found.mutations == 3
    check(name, found)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", KINDS)
def test_mutations_are_read_or_refused(name: str, tmp_path: Path) -> None:
    found = fuzz.fuzz(KINDS[name], name, range(60), tmp_path)
    assert found.mutations == 60
    check(name, found)
