"""Environment variables in the report: relevant ones, no secrets; the limit of open files; garbage collection."""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from titanlite.runtime.environment import OPEN_FILES, environment_lines, overridden, raise_open_file_limit
from titanlite.runtime.process_state import PacedGarbageCollection


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(OPEN_FILES, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_set_overridden_and_removed_variables_are_marked() -> None:
    before = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "TORCH_LOGS": "dynamo", "HOME": "/root"}
    now = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "WARN", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HOME": "/root"}
    assert environment_lines(before, now) == [
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 (set by titanlite)",
        "NCCL_DEBUG=WARN (overridden by titanlite; was INFO)",
        "OMP_NUM_THREADS=2",
        "TORCH_LOGS removed (was dynamo)",
    ]


@pytest.mark.parametrize(
    "name", ["PATH", "HF_HOME", "AWS_REGION", "MY_NCCL_DEBUG", "OMP_NUM_THREADS_2", "TORCHELASTIC_RUN_ID"]
)
def test_other_variables_are_ignored(name: str) -> None:
    assert environment_lines({name: "x"}, {name: "y"}) == []


@pytest.mark.parametrize(
    "name",
    ["NCCL_API_KEY", "TITANLITE_TOKEN", "TORCH_secret", "CUDA_PASSWORD", "TITANLITE_CREDENTIALS", "NCCL_AUTHORITY"],
)
def test_names_that_look_like_secrets_are_left_out(name: str) -> None:
    assert environment_lines({}, {name: "hunter2"}) == []
    assert environment_lines({name: "hunter2"}, {}) == []


@pytest.mark.parametrize(
    "value", ["https://user:hunter2@host/x", "s3://b/x?access_token=hunter2", "a;Signature=hunter2"]
)
def test_values_that_look_like_secrets_are_hidden(value: str) -> None:
    for lines in (
        environment_lines({}, {"TITANLITE_CACHE": value}),
        environment_lines({"TITANLITE_CACHE": value}, {"TITANLITE_CACHE": "/tmp"}),
        environment_lines({"TITANLITE_CACHE": value}, {}),
    ):
        assert len(lines) == 1
        assert "hunter2" not in lines[0]
        assert "hidden" in lines[0]


def test_a_name_with_tokenizer_is_not_a_secret() -> None:
    assert environment_lines({"TOKENIZERS_PARALLELISM": "1"}, {"TOKENIZERS_PARALLELISM": "1"}) == [
        "TOKENIZERS_PARALLELISM=1"
    ]


def test_a_value_is_printed_on_one_line() -> None:
    (line,) = environment_lines({}, {"NCCL_DEBUG": "a\nb\x1b[31m"})
    assert line.isprintable()


def test_only_changes_of_the_users_values_are_overridden() -> None:
    before = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "TORCH_X": "1", "HOME": "/"}
    now = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "512"}
    assert overridden(before, now) == ["NCCL_DEBUG=WARN (overridden by titanlite; was INFO)", "TORCH_X removed (was 1)"]


class Node:
    """A reference cycle, freed only by garbage collection."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def _own_gc() -> Iterator[None]:
    """Enable automatic collection after each test, without visits to all modules."""
    yield
    gc.freeze()
    gc.enable()


def test_cycles_live_until_the_chosen_step() -> None:
    with PacedGarbageCollection(3) as collection:
        alive = []
        for step in range(1, 7):
            cycle = weakref.ref(Node())
            collection.after_step(step)
            alive.append(cycle() is not None)
        assert not gc.isenabled()
    assert alive == [True, True, False, True, True, False]


def test_many_objects_do_not_trigger_a_collection() -> None:
    with PacedGarbageCollection(1000):
        cycle = weakref.ref(Node())
        _ = [[] for _ in range(200_000)]
        assert cycle() is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_leaving_restores_the_previous_state(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    frozen = 0
    try:
        with PacedGarbageCollection(1):
            frozen = gc.get_freeze_count()
            raise ValueError
    except ValueError:
        pass
    assert frozen > 0
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


FAULTS_OF_STEPS = """
import resource, torch
from titanlite.runtime.process_state import keep_freed_memory
keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(64)]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del tensors
"""


MEMORY_BETWEEN_TENSORS = """
import os, torch
from titanlite.runtime.process_state import keep_freed_memory, return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
keep_freed_memory()
tensors = [torch.ones(2**18) for _ in range(200)]
del tensors[:199]
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_freed_memory_between_tensors_is_returned() -> None:
    command = [sys.executable, "-c", MEMORY_BETWEEN_TENSORS]
    returned = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert returned > 150 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc only")
@pytest.mark.parametrize(("environment", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "0"}, False)])
def test_freed_memory_serves_the_next_step(environment: dict[str, str], is_kept: bool) -> None:
    """256 MiB of tensors in each step: 65,536 pages, of which the kernel may have taken back some, 512 at a time."""
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_STEPS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    assert (int(ran.stdout.split()[-1]) < 6_554) == is_kept  # the user's variable wins
