"""Checkpoints in a store that fails: each fault is repeated or explained, and the run resumes with the same numbers."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed.program import Program, Starter
from tests.distributed.resuming import Start, start_runs
from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket
from titanlite.storage import store as store_module
from titanlite.storage.address import Address
from titanlite.storage.store import Store
from titanlite.tools import digest

pytestmark = pytest.mark.slow

SHARD = r"attempt-\w+/__"


@contextmanager
def reaching(bucket: Bucket, damages: bool = False) -> Iterator[None]:
    """Context of a start: the variables of the bucket, and short waits. damages: of the run's checkpoints, delete a
    shard of step 6 and change one of step 5."""
    short = patch.object(store_module, "DELAYS_S", (0.02, 0.02, 0.02))
    with patch.dict(os.environ, bucket.environment), short:
        if damages:
            store = Store(Address.parse(f"{bucket.address}/run"))
            shards = {step: [name for name in store.list(f"step-{step}") if "/__" in name] for step in (5, 6)}
            store.delete(shards[6][:1])
            for name in shards[5][:1]:
                store.write(name, bytes(store.facts(name).bytes))
        yield


def test_a_run_survives_its_store(
    tmp_path: Path, faulty_store: tuple[Bucket, Proxy], capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, proxy = faulty_store
    for fault in (
        Fault("cut upload", "PUT", f"step-1/{SHARD}", times=2),
        Fault("cut answer", "PUT", "step-1/MANIFEST", times=2),
        Fault("refuse", "PUT POST GET HEAD DELETE", "step-2/", times=4),
        Fault("stall", "PUT", f"step-3/{SHARD}", times=1),
        Fault("refuse", "PUT", f"step-4/{SHARD}", times=1, status=403, code="AccessDenied"),
        Fault("refuse", "PUT", "step-5/MANIFEST", times=1, status=400, code="ExpiredToken"),
        Fault("alter", "GET", f"step-3/{SHARD}", times=2),
    ):
        proxy.add(fault)
    stored = (f"checkpoint.folder={bucket.address}/run", "checkpoint.interval=1", "storage.timeout_s=1")
    stored += ("checkpoint.on_save_error=continue",)

    def start(steps: int, settings: tuple[str, ...] = stored, *, damages: bool = False) -> Start:
        return Start((*settings, f"training.steps={steps}"), 2, around=partial(reaching, bucket, damages))

    local = Start(("checkpoint.interval=1", "training.steps=7"), 2, run="local")
    missing = Start(("checkpoint.folder=s3://missing/run",), 2, run="missing", around=partial(reaching, bucket))
    starts = [local, start(5), start(6), start(7, damages=True), missing]
    expected, failed, resumed, fell_back, lost = start_runs(tmp_path, starts)
    # cut connections, refusals and a stalled request are repeated; failed saves lose nothing
    assert failed.logged("cannot save step 4: rank 0: cannot write") or failed.logged("cannot save step 4: rank 1")
    assert failed.logged("check that the credentials are valid and may list, read, write and delete objects there")
    assert re.search(r"cannot save step 5: .*the credentials have expired: renew them and restart", failed.error)
    # damage in transit is found and read again
    assert (resumed.step, resumed.error) == (3, "")
    assert resumed.logged("did not match calculated checksum")
    assert [fault.played for fault in proxy.faults] == [fault.times for fault in proxy.faults]
    # damage in the store: the next older checkpoint is loaded
    assert fell_back.logged("Checkpoint step-6 is corrupted: __")
    assert fell_back.logged("is missing. Quarantined as step-6.invalid-")
    assert fell_back.logged("Checkpoint step-5 is corrupted: __")
    assert (fell_back.step, fell_back.error, fell_back.end) == (4, "", expected.end)
    assert {**failed.rows, **resumed.rows, **fell_back.rows} == expected.rows
    assert "the bucket missing does not exist: create it, or fix the address" in lost.error
    # commands read the run at its address
    with pytest.raises(SystemExit, match="False"):
        digest.main([f"{bucket.address}/run", str(tmp_path / "local")])
    assert "equal: all tensors that they have in common, bit for bit" in capsys.readouterr().out


ON_A_HOST = """
import os, socket
from titanlite import train
from titanlite.ranks import claim
from titanlite.ranks.failure import end_process

claim.BEAT_S, claim.SILENT_S = 0.5, 4.0
socket.gethostname = lambda: os.environ["PLANTED_HOST"]
train.main()
end_process(0)
"""


@pytest.mark.soak
def test_of_two_jobs_with_one_folder_one_trains(tmp_path: Path, store: Bucket, start: Starter) -> None:
    """Jobs of two ranks, each on a host of its own with a dump folder of its own."""
    path = tmp_path / "program.py"
    path.write_text(ON_A_HOST)
    shared = ("--training.steps", "100000", "--checkpoint.enable", "true")
    shared += ("--checkpoint.folder", f"{store.address}/run")

    def job(host: str, interval: int = 5) -> Program:
        environment = store.environment | {"PLANTED_HOST": host}
        own = ("--job.dump_folder", str(tmp_path / f"{host}-output"), "--checkpoint.interval", str(interval))
        program = (str(path),)
        return start(tmp_path, *shared, *own, ranks=2, program=program, name=host, environment=environment)

    def stop(program: Program, number: signal.Signals) -> None:
        for pid in program.processes():
            os.kill(pid, number)

    first = job("first", interval=50_000)  # no save is due
    first.wait_for(" 10/100000 ")
    refused = job("refused")
    assert refused.wait() != 0
    message = (
        f"in use by another job: process {first.ranks()[0]} on host first, since .*; its heartbeat continues; give"
    )
    assert (
        len(re.findall(f"titanlite: checkpoint.folder: {store.address}/run is {message} another", refused.output)) == 1
    )
    assert "/100000 " not in refused.output

    stop(first, signal.SIGSTOP)
    second = job("second")
    second.wait_for("Saved step")
    assert "is silent for 4 s" in second.output
    stop(first, signal.SIGCONT)
    since = time.monotonic()
    assert first.wait() != 0
    first.wait_until_gone(5)
    assert time.monotonic() - since < 15
    found = re.findall(f"was taken over by process {second.ranks()[0]} on host second", first.output)
    assert len(found) == 1, first.output
    assert first.output.count("titanlite: ") == 1

    stop(second, signal.SIGKILL)
    third = job("third")
    third.wait_for("Saved step")
    assert "is silent for 4 s" in third.output
    assert "Start: step " in third.output
    stop(third, signal.SIGTERM)
    assert third.wait() == 0
