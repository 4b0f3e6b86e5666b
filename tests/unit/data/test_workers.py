"""Worker processes: the same steps, states and errors as from the thread, and no hang if a worker dies."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.ranks import build
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.workers import Prefetcher, WorkerPool
from titanlite.ranks.signals import STOP_SIGNALS
from titanlite.runtime.errors import DataError, UserError

WORDS = ["the", "model", "reads", "a", "few", "words", "and", "learns", "which", "of", "them", "follow"]


@pytest.fixture
def section(write_jsonl: Callable[..., Path]) -> DataConfig:
    texts = [" ".join(WORDS[n % 7 : n % 7 + 1 + n % 9]) + f" {n}" for n in range(40)]
    one, other = write_jsonl(texts), write_jsonl([*texts[:20], b"{broken", *texts[20:]], "other.jsonl")
    sources = (
        SourceConfig(kind="jsonl", path=str(one), weight=2),
        SourceConfig(kind="jsonl", path=str(other), weight=1),
    )
    return DataConfig(
        num_streams=6, max_piece_bytes=1000, document_mask=True, on_bad_row="skip", sources=sources, num_workers=0
    )


@pytest.fixture
def make(section: DataConfig, tokenizer: Tokenizer) -> Iterator[Callable[..., Loader]]:
    """make(num_workers, ...): a loader that is closed after the test."""
    made: list[Loader] = []

    def one(num_workers: int, **changes: Any) -> Loader:
        config = DataConfig(**vars(section) | {"num_workers": num_workers} | changes)
        made.append(build(config, tokenizer, global_batch_size=6, local_batch_size=2))
        return made[-1]

    yield one
    for loader in made:
        loader.close()


def take(loader: Loader, steps: int) -> None:
    for _ in range(steps):
        loader.next_step()


def same_steps(one: Loader, other: Loader, steps: int) -> bool:
    for _ in range(steps):
        for mine, its in zip(one.next_step(), other.next_step(), strict=True):
            if not all(torch.equal(a, b) for a, b in zip(mine, its, strict=True)):
                return False
        if not (torch.equal(one.state(), other.state()) and one.origins == other.origins):
            return False
    return one.bad_rows == other.bad_rows and one.ended == other.ended


@pytest.mark.parametrize(
    ("num_workers", "packing"),
    [
        (1, "concatenate"),
        pytest.param(2, "best_fit", marks=pytest.mark.slow),
        *(pytest.param(count, "none", marks=pytest.mark.soak) for count in (4, 9)),
    ],
)
def test_steps_do_not_depend_on_the_number_of_workers_which_log_and_end(
    make: Callable[..., Loader], num_workers: int, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    thread, workers = make(0, packing=packing), make(num_workers, packing=packing)
    assert same_steps(thread, workers, 30)
    assert thread.bad_rows == 1
    assert [record.getMessage()[:20] for record in caplog.records].count("skipped a bad row: /") == 2
    state = thread.state()
    for loader in (thread, workers):
        loader.next_step()
        loader.load_state(state)
    assert same_steps(thread, workers, 5)
    processes = pids(workers)
    workers.close()
    assert len(processes) == min(num_workers, len(workers.stream_ids))
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_bad_row_is_raised_at_the_same_sequence_and_its_worker_exits_cleanly(
    make: Callable[..., Loader], capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression test: the worker aborted, and the interpreter printed a fatal error besides the message."""
    errors = []
    for num_workers in (0, 2):
        loader = make(num_workers, on_bad_row="error")
        with pytest.raises(DataError) as raised:
            take(loader, 40)
        errors.append((str(raised.value), raised.value.sequence, loader.state().tolist()))
    assert errors[0] == errors[1]
    assert "other.jsonl, line 21: " in errors[0][0]
    assert isinstance(loader._preparation, WorkerPool)
    codes: list[int] = []
    while not codes:  # only the worker with the bad row exits on its own
        codes = [code for worker in loader._preparation._workers if (code := worker.process.poll()) is not None]
    assert codes == [0]
    assert capfd.readouterr().err == ""


def pids(loader: Loader) -> list[int]:
    assert isinstance(loader._preparation, WorkerPool)
    return [worker.process.pid for worker in loader._preparation._workers]


def test_a_killed_worker_is_an_immediate_error(make: Callable[..., Loader]) -> None:
    loader = make(2)
    loader.next_step()
    os.kill(pids(loader)[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"the worker process \d+ was killed by SIGKILL: .*num_workers = 0"):
        take(loader, 5000)  # steps left in the pipe are delivered first
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_workers_refuse_other_files_than_those_of_the_loader(
    make: Callable[..., Loader], section: DataConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """They open the files and the tokenizer again, later."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    shutil.copyfile(section.sources[0].path, folder / "first.jsonl")
    sources = (section.sources[1], SourceConfig(kind="jsonl", path=str(folder), weight=1))

    def refused(change: Callable[[], object]) -> str:
        loader = make(2, sources=sources)
        change()
        with pytest.raises(UserError) as raised:
            loader.next_step()
        return str(raised.value).partition(":")[0]

    make(2, sources=sources).next_step()
    assert refused(lambda: shutil.copyfile(folder / "first.jsonl", folder / "second.jsonl")) == "data.sources.1.path"
    assert refused(lambda: os.utime(folder / "second.jsonl", (1, 1))) == "data.sources.1.path"
    assert refused(lambda: os.remove(folder / "second.jsonl")) == "data.sources.1.path"
    file = Path(tokenizer.arguments["file"])
    assert refused(lambda: file.write_text(file.read_text() + "\n")) == "tokenizer.path"


def test_a_worker_exits_when_its_pipe_closes() -> None:
    """Workers ignore signals that stop training, because the rank trains one more step. The closed pipe stops them."""
    worker = subprocess.Popen([sys.executable, "-m", "titanlite.data.workers"], stdin=subprocess.PIPE)
    assert worker.stdin is not None
    expected = sum(1 << number - 1 for number in STOP_SIGNALS)
    end = time.monotonic() + 20
    while sys.platform == "linux" and time.monotonic() < end:
        (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text())
        if int(mask, 16) & expected == expected:
            break
        time.sleep(0.01)
    else:
        assert sys.platform != "linux", "the signals are not ignored"
    worker.stdin.close()
    assert worker.wait(20) == 0


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "titanlite-data"]


def test_results_come_in_order_and_at_most_depth_ahead() -> None:
    produced: list[int] = []
    numbers = count()

    def produce() -> int:
        produced.append(next(numbers))
        return produced[-1]

    prefetcher = Prefetcher(produce, 2)
    assert [prefetcher.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    while len(produced) < 7:
        time.sleep(0.01)
    time.sleep(0.05)
    assert produced == list(range(7))
    prefetcher.close()


def test_an_error_follows_the_earlier_results_and_repeats() -> None:
    results = iter([1, 2])
    prefetcher = Prefetcher(lambda: next(results), 5)
    time.sleep(0.05)
    assert [prefetcher.get(), prefetcher.get()] == [1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.get()
    prefetcher.close()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_an_error_that_would_end_the_program_silently_is_a_failure(error: BaseException) -> None:
    def produce() -> int:
        raise error

    prefetcher = Prefetcher(produce, 2)
    with pytest.raises(RuntimeError, match=f"^the data thread ended by {re.escape(repr(error))}$"):
        prefetcher.get()
    prefetcher.close()


def test_the_thread_ends_with_the_last_reference() -> None:
    prefetcher = Prefetcher(lambda: 0, 2)
    reference = weakref.ref(prefetcher)
    assert len(data_threads()) == 1
    del prefetcher
    gc.collect()
    assert reference() is None
    assert data_threads() == []


def test_close_returns_after_its_timeout() -> None:
    gate = threading.Event()
    prefetcher = Prefetcher(gate.wait, 2)
    prefetcher.close(timeout_s=0.05)
    assert len(data_threads()) == 1
    gate.set()
    start = time.monotonic()
    prefetcher.close(timeout_s=None)
    prefetcher.close()
    assert time.monotonic() - start < 0.5
    assert data_threads() == []


@pytest.mark.parametrize(
    "end",
    ["", *(pytest.param(end, marks=pytest.mark.slow) for end in ("raise SystemExit(3)", "raise KeyboardInterrupt"))],
)
def test_the_interpreter_exits_while_the_thread_works(end: str) -> None:
    program = (
        "import tokenizers, time\n"
        "from tokenizers import models, pre_tokenizers\n"
        "from titanlite.data.workers import Prefetcher\n"
        "t = tokenizers.Tokenizer(models.BPE({'a': 0, 'b': 1, 'ab': 2}, [('a', 'b')]))\n"
        "text = 'ab' * 20000\n"
        "p = Prefetcher(lambda: t.encode_batch_fast([text] * 4), 10**9)\n"
        f"p.get()\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, -2), done.stderr
    assert "fatal" not in done.stderr.lower()
