"""Two jobs on one checkpoint folder in a store: one gets it, whatever the previous owner was and however it ended."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket
from tests.unit.ranks.test_job_lock import says
from titanlite.ranks import claim as claim_module
from titanlite.ranks.claim import claim, require_claim
from titanlite.ranks.job_lock import JOB_LOCK_FILE, Owner, this_process
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address
from titanlite.storage.store import Store

pytestmark = pytest.mark.usefixtures("propagating_log")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.05, "SILENT_S": 0.4, "POLL_S": 0.02, "SETTLE_S": 0.3}.items():
        monkeypatch.setattr(claim_module, name, seconds)


@pytest.fixture
def folder() -> Store:
    return Store(Address.parse(f"memory://{uuid4().hex}/run"))


def enter(
    folder: Store, *, take_over: bool = False, on_lost: Callable[[str], object] = pytest.fail, **environment: str
) -> Any:
    about = {"take_over": take_over, "environment": environment}
    return claim(folder.address, 0, **about, on_lost=on_lost, wait_s=0.1)


@contextmanager
def owned(folder: Store, number: int = 1, *, beats: bool = False, **changes: Any) -> Iterator[Owner]:
    """The claim of another job, which writes its heartbeat inside if it `beats`."""
    owner = replace(this_process({}), **changes)
    folder.create(f"{JOB_LOCK_FILE}/{number}.json", owner.encode())
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(0.03):
            count += 1
            folder.write(f"{JOB_LOCK_FILE}/{owner.token}.beat", b"%d" % count)

    thread = threading.Thread(target=beat)
    if beats:
        thread.start()
    yield owner
    ended.set()
    if beats:
        thread.join()


def claims(folder: Store) -> list[str]:
    return [name for name in sorted(folder.children(JOB_LOCK_FILE)) if name.endswith(".json")]


JOB = """
import os, sys
from titanlite.ranks.claim import claim
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address

try:
    with claim(Address.parse(sys.argv[1]), 0, take_over=False, environment=os.environ, on_lost=print, wait_s=1.0):
        print("inside", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


@contextmanager
def job(folder: Store) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the folder and keeps it until its stdin is closed."""
    command = [sys.executable, "-c", JOB, str(folder.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


OTHER_HOST = {"host": "other", "boot": "other"}


@pytest.mark.parametrize(
    ("changes", "beats", "options", "expected"),
    [
        ({"process_start": "0"}, False, {}, "taken over; the job of process .* has ended without releasing the folder"),
        ({}, False, {}, None),  # this process
        ({}, False, {"take_over": True}, None),
        ({"pid": 1, "process_start": ""}, False, {}, None),  # runs on this host
        (OTHER_HOST, True, {}, None),
        (OTHER_HOST, False, {}, "taken over; the job of process .* on host other, .* is silent for 0 s"),
        (OTHER_HOST, True, {"take_over": True}, r"may run: job\.take_over = true"),
        (OTHER_HOST | {"torchrun_id": "a"}, False, {"TORCHELASTIC_RUN_ID": "a"}, "has ended without"),
        (
            OTHER_HOST | {"slurm_job_id": "7", "slurm_restarts": 0},
            False,
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            "has ended without",
        ),
    ],
)
def test_an_owner_that_may_run_keeps_the_folder(
    folder: Store,
    changes: dict[str, Any],
    beats: bool,
    options: dict[str, Any],
    expected: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with owned(folder, beats=beats, **changes) as owner:
        if expected is None:
            with pytest.raises(UserError, match=re.escape(f"is in use by another job: {owner}")) as refused:
                enter(folder, **options).__enter__()
            assert ("its heartbeat continues" in str(refused.value)) is (changes == OTHER_HOST)
            assert claims(folder) == ["1.json"]
        else:
            with enter(folder, **options):
                assert re.search(expected, caplog.text)
                require_claim(folder.address)
                assert claims(folder)[-1] == "2.json"
    if expected is not None:
        caplog.clear()
        with enter(folder):  # at once: it was released
            assert not caplog.records


def test_the_heartbeat_of_the_owner_is_seen(folder: Store) -> None:
    with enter(folder):
        time.sleep(0.1)
        (beat,) = (name for name in folder.children(JOB_LOCK_FILE) if name.endswith(".beat"))
        before = folder.read(f"{JOB_LOCK_FILE}/{beat}")
        time.sleep(0.2)
        assert int(folder.read(f"{JOB_LOCK_FILE}/{beat}")) > int(before)
    assert folder.read(f"{JOB_LOCK_FILE}/{beat}") == b"released"


def test_a_damaged_claim_needs_take_over(folder: Store) -> None:
    folder.write(f"{JOB_LOCK_FILE}/3.json", b"{")
    with pytest.raises(UserError, match=r"run/job\.lock is damaged, .* pass --job\.take_over true"), enter(folder):
        pass
    with enter(folder, take_over=True):
        time.sleep(0.1)
        assert claims(folder) == ["4.json"]


def test_a_late_owner_ends_and_saves_nothing(folder: Store) -> None:
    lost: list[str] = []
    with enter(folder, on_lost=lost.append):
        require_claim(folder.address)
        with owned(folder, 2, **OTHER_HOST) as owner:
            message = f"checkpoint.folder: {folder.address} was taken over by {owner}, while this job ran"
            with pytest.raises(UserError, match=re.escape(message)):
                require_claim(folder.address)
            time.sleep(0.2)
    assert [message in text for text in lost] == [True]
    assert claims(folder)[-1] == "2.json"


def test_a_number_that_was_freed_meanwhile_is_no_claim(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has read claim 1 as ended is slow to create claim 2; claims 2 and 3 are taken, and 2 is deleted."""
    latest, stale = claim_module._latest, [2]

    def once_stale(store: Store) -> Any:
        if stale[0]:
            stale[0] -= 1
            return claim_module._Claim(0)
        return latest(store)

    monkeypatch.setattr(claim_module, "_latest", once_stale)
    with (
        owned(folder, 3, beats=True, **OTHER_HOST),
        pytest.raises(UserError, match="its heartbeat continues"),
        enter(folder),
    ):
        pass


@pytest.mark.slow
def test_a_killed_job_frees_the_folder_and_a_stopped_one_keeps_it(store: Bucket) -> None:
    folder = Store(Address.parse(f"{store.address}/run"))
    with job(folder) as first, job(folder) as second:
        inside = first if says(first) == "inside" else second
        if inside is first:
            assert f"is in use by another job: process {first.pid} on host" in says(second)
        else:
            assert says(second) == "inside"
        inside.send_signal(signal.SIGSTOP)
        with job(folder) as third:
            assert f"is in use by another job: process {inside.pid} on host" in says(third)
        inside.kill()
        inside.wait()
        with job(folder) as fourth:
            assert says(fourth) == "inside"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [None, Fault("ignore condition", "PUT"), Fault("refuse", "PUT", status=501, code="NotImplemented")]
)
def test_one_of_eight_jobs_gets_a_folder(
    faulty_store: tuple[Bucket, Proxy], fault: Fault | None, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, proxy = faulty_store
    if fault:
        fault.conditional = True
        proxy.add(fault)
    folder = Store(Address.parse(f"{bucket.address}/run"))
    entered, refused, done = [], [], threading.Event()

    def job(number: int) -> None:
        try:
            with enter(folder):
                entered.append(number)
                done.wait(30)
        except Exception as error:
            refused.append(repr(error))
        if len(refused) == 7:
            done.set()

    with ThreadPoolExecutor(8) as threads:
        for result in [threads.submit(job, number) for number in range(8)]:
            result.result()
    assert (len(entered), len(refused)) == (1, 7), refused
    assert all("is in use by another job" in message for message in refused)
    assert ("the store has no conditional put" in caplog.text) is (fault is not None)
