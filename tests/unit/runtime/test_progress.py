"""Progress bars leave nothing behind."""

import subprocess
import sys

import pytest

ENDS_AT_ONCE = """
import multiprocessing, os
multiprocessing.set_start_method("forkserver")  # the default of Python 3.14
from {module} import tqdm
list(tqdm([1], disable=True))
from tqdm.auto import tqdm
list(tqdm([1], disable=True))
os._exit(0)
"""


@pytest.mark.parametrize(("module", "leaks"), [("titanlite.runtime.progress", False), ("tqdm", True)])
def test_a_bar_needs_no_semaphore(module: str, leaks: bool) -> None:
    command = [sys.executable, "-c", ENDS_AT_ONCE.format(module=module)]
    warnings = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert ("leaked semaphore" in warnings) is leaks, warnings
    assert leaks or not warnings
