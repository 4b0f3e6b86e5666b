"""Checkpoints in a store of S3's protocol: a killed run resumes from there as from a folder, on another mesh too."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.distributed.program import Starter
from tests.distributed.resuming import Start, numbers, start_runs
from tests.stores import Bucket
from titanlite.checkpoint.folder import complete_manifest, published_steps
from titanlite.storage.address import Address

pytestmark = pytest.mark.slow

STEPS = 8


@contextmanager
def environment_of(store: Bucket) -> Iterator[None]:
    """The credentials for the store, in the process of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        patch.delenv("AWS_ENDPOINT_URL")  # [storage] has it
        yield


def test_a_run_in_a_store_equals_a_run_in_a_folder(tmp_path: Path, store: Bucket) -> None:
    settings = (f"training.steps={STEPS}", "checkpoint.keep_latest_k=2")
    reach, around = (f"storage.endpoint={store.endpoint}", "storage.region=us-east-1"), partial(environment_of, store)
    in_store = (*settings, *reach, f"checkpoint.folder={store.address}/run/checkpoint", "checkpoint.async_mode=async")

    copy = (
        *reach,
        *settings,
        f"checkpoint.initial_load_path={store.address}/run/checkpoint",
        "checkpoint.initial_load_model_only=false",
    )
    outcomes = start_runs(
        tmp_path,
        [
            Start(settings, 1, (5, 0), "folder"),
            Start(settings, 2, None, "folder"),
            Start(in_store, 1, (5, 0), "store", around),
            Start(in_store, 2, None, "store", around),
            Start(copy, 1, None, "copy", around),
        ],
    )
    assert [outcome.error for outcome in outcomes] == [""] * 5
    assert [outcome.step for outcome in outcomes] == [0, 4, 0, 4, STEPS]
    _, in_folder, _, resumed, copied = outcomes
    assert resumed.end == in_folder.end == copied.begin
    assert numbers(tmp_path / "store") == numbers(tmp_path / "folder")
    assert resumed.logged("contents when they are read")
    keys = store.keys()
    assert {key.split("/")[2] for key in keys if "step-" in key} == {"step-4", "step-6", "step-8"}  # 4: of the start

    latest = max(key for key in keys if "/step-8/" in key and key.endswith(".distcp"))
    content = bytearray(store.request("GET", latest))
    content[len(content) // 2] ^= 1
    store.request("PUT", latest, bytes(content))
    more = (*in_store, "training.steps=10")
    (again,) = start_runs(tmp_path, [Start(more, 2, None, "store", around)])
    assert (again.error, again.step) == ("", 6)
    assert again.logged("Checkpoint step-8 is corrupted: ")
    assert again.logged("its xxh3-128 differs. Quarantined as step-8.invalid-")
    keys = store.keys()
    assert any("/step-8.invalid-" in key for key in keys)


@pytest.mark.soak  # default suite: test_a_kill_at_any_request_loses_nothing
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.timeout(3600))])
def test_kills_at_random_moments_of_saving(kills: int, tmp_path: Path, store: Bucket, start: Starter) -> None:
    """One and two ranks in turn, which save after each step, are killed within or between saves."""
    random, steps, folder = Random(kills), 8 * (kills + 1), Address.parse(f"{store.address}/run")
    settings = ("--training.steps", str(steps), "--checkpoint.enable", "true", "--checkpoint.interval", "1")
    stored = (*settings, "--checkpoint.folder", str(folder), "--checkpoint.async_mode", "async")
    latest = 0
    for number in range(kills + 1):
        ranks, name = 2 * (number % 2), f"output{number}"
        program = start(tmp_path, *stored, ranks=ranks, name=name, environment=store.environment)
        if number < kills:
            program.wait_for("Saved step")
            time.sleep(random.uniform(0, 0.6))
            program.process.kill()
            program.wait_until_gone(5)
        else:
            program.succeed()
        assert f"Start: step {latest}," in program.output or latest == 0, program.output
        before, (*_, latest) = latest, published_steps(folder)
        assert latest > before
        for step in published_steps(folder):
            complete_manifest(folder, step)
    assert latest == steps
    start(tmp_path, *settings, "--job.dump_folder", str(tmp_path / "local"), name="output").succeed()
    found, expected = numbers(tmp_path / "out"), numbers(tmp_path / "local")
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, steps + 1))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-12, abs=0)
    keys = store.keys()
    attempts = {key.rpartition("/")[0] for key in keys if "/attempt-" in key}
    assert len(attempts) == len(published_steps(folder)), "an attempt was left"
