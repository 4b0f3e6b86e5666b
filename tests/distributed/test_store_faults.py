"""Checkpoints in a store that fails: each fault is repeated or explained, and the run resumes with the same numbers."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

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
