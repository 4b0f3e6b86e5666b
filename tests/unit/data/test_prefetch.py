import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from itertools import count

import pytest

from titanlite.data.workers import Prefetcher


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
