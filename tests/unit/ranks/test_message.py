"""The text of a failure report: of each kind of error, and which rank it names: one without heartbeats, else that with
the oldest position, else that which is behind in the collectives."""

import errno
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.ranks.agreement import RanksError
from titanlite.ranks.message import (
    NO_SPACE,
    Seen,
    describe_error,
    describe_loss,
    describe_ranks,
    last_numbers,
    ranks_behind,
)
from titanlite.runtime.errors import ConfigError, LateRanksError, Problem, UserError

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57997"


def text_of(error: BaseException, *, is_brief: bool = False, alone: bool = False) -> str:
    """The message of rank 3, in which ranks are explained as "explained", with those that are late."""

    def explain(late: Sequence[int]) -> str:
        return f"explained {[*late]}"

    return describe_error(error, "3", is_brief=is_brief, explain=None if alone else explain)


ERRORS = [
    (UserError("no such corpus"), "no such corpus"),
    (ConfigError([Problem("training.steps", 0, "at least 1", "give a positive number")]), "the configuration has 1"),
    (ValueError("planted"), "rank 3 failed: ValueError: planted"),
    (OSError(errno.EIO, "broken"), "rank 3 failed: OSError: [Errno 5] broken"),
    (SystemExit(3), "rank 3 failed: SystemExit: 3"),
    (RanksError("rank 1: no space left"), "rank 1: no space left"),
    (RuntimeError(LOST), f"explained []\n(rank 3 lost the connection: {LOST})"),
    (dist.DistStoreError("wait timeout"), "explained []\n(rank 3 lost the connection: wait timeout)"),
    (LateRanksError([2, 3], 9), "explained [2, 3]\n(rank 3: no message within 9 s from rank 2 and 1 more)"),
    (RuntimeError("shape mismatch in skip_connection"), "rank 3 failed: RuntimeError: shape mismatch"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS, ids=[repr(error)[:40] for error, _ in ERRORS])
def test_each_kind_of_error_has_its_text(error: BaseException, text: str) -> None:
    """Only errors of torch's collectives are explained by the positions of other ranks, if there are others."""
    assert text_of(error).startswith(text)
    if not isinstance(error, UserError):
        assert text_of(error, alone=True).startswith(f"rank 3 failed: {type(error).__name__}: ")


def test_without_the_store_a_lost_connection_is_one_line() -> None:
    lost = "rank 3 lost the connection to the other ranks: Connection closed by peer"
    assert text_of(RuntimeError("Connection closed by peer"), is_brief=True, alone=True) == lost
    assert text_of(UserError("no such corpus"), is_brief=True, alone=True) == "no such corpus"
    assert text_of(ValueError("planted"), is_brief=True, alone=True) == "rank 3 failed: ValueError: planted"


def test_a_long_cause_is_cut() -> None:
    assert len(text_of(RuntimeError(f"Timed out waiting, keys: {'finished/0, ' * 1000}"))) < 400


def test_limits_of_the_system_are_explained() -> None:
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for error in (too_many, RuntimeError(f"[enforce fail at device.cc:186] rv != -1. {too_many.strerror}")):
        assert text_of(error).startswith("rank 3: too many open files, the limit is ")
        assert "ulimit -n 65536" in text_of(error)
    for error in (UserError(f"a.npy cannot be read: {too_many.strerror}"), RanksError(f"rank 1: {too_many}")):
        limit = r"\n\(too many open files, the limit is \d+: .*ulimit -n 65536\)"
        assert re.fullmatch(re.escape(str(error)) + limit, text_of(error))
    assert text_of(UserError("a.npy cannot be read")) == "a.npy cannot be read"
    full = f"a.npy cannot be written: {os.strerror(errno.ENOSPC)}"
    assert text_of(UserError(full)) == f"{full}\n({NO_SPACE})"
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")):
        assert text_of(error).startswith("rank 3: out of host memory: use a smaller model or batch, ")
    assert text_of(RuntimeError("can't start new thread")).startswith("rank 3: no thread can be started")
    with pytest.raises(OSError, match="too long") as raised:
        os.stat("d" * 300)
    assert text_of(raised.value).endswith("d is too long for the file system: choose a shorter one")


def seen(count: int, phase: str = "saving", s_ago: float = 0.2, pulse_s_ago: float = 0.2, **given: Any) -> Seen:
    """A rank that has entered `count` phases, whose node has given a heartbeat s_ago, and its watch thread a pulse."""
    changed = {"node_at": 1000 - s_ago, "alive_at": 1000 - pulse_s_ago, "changed_at": 900.0, "step": 7, **given}
    return Seen(count=count, phase=phase, host=f"node{count}", beats=3, **changed)


HELD = {"pulse_s_ago": 90.0}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([seen(5), seen(5, s_ago=2.2), seen(5)], "rank 1 on node5: no heartbeat, in step 7 (saving)"),
        ([seen(5), seen(5), seen(5, state="ended")], "rank 2 on node5: no heartbeat, in step 7 (saving)"),
        ([seen(5), seen(4), seen(5, state="stopped")], "rank 2 on node5: no heartbeat, in step 7 (saving)"),
        ([seen(9, s_ago=9), seen(4)], "rank 1 on node4 hangs or lags: in step 7 (saving) for 100 s; the other"),
        ([seen(9), seen(4), seen(4)], "ranks 1, 2 on node4 hangs or lags"),
        ([seen(9), seen(4, state="ended", has_left=True), seen(5), seen(9)], "rank 2 on node5 hangs or lags"),
        ([seen(5), seen(5)], "all ranks are in step 7 (saving) for 100 s: one of them hangs, or the network is lost"),
        ([seen(5), seen(5, **HELD)], "rank 1 on node5 hangs or lags: in step 7 (saving) for 100 s, in a call that"),
        (
            [seen(5), seen(5, **HELD), seen(5, **HELD)],
            "all ranks are in step 7 (saving) for 100 s: one of them hangs, or the network is lost; the threads of "
            "ranks 1, 2 stand still",
        ),
        (
            [seen(5), seen(4), *[seen(5, **HELD)] * 6],
            "rank 1 on node4 hangs or lags: in step 7 (saving) for 100 s; the",
        ),
        (
            [seen(5, step=0)] * 2,
            "all ranks are in step 0 (saving) for 100 s: one of them hangs, or the network is lost, or they meet",
        ),
    ],
)
def test_the_rank_that_others_wait_for_is_named(ranks: list[Seen], text: str) -> None:
    """Rank 0 writes the message: its own heartbeats do not count. If most ranks hold Python's lock, they wait inside a
    launch."""
    assert describe_ranks(dict(enumerate(ranks)), 0, 1000.0).startswith(text)


def test_the_store_may_be_lost() -> None:
    text = describe_loss([5, 7, "saving", "node5", 987.0], 1000.0)
    assert "launcher or rank 0 has ended" in text
    assert text.endswith("; rank 0 was last seen in step 7 (saving) on node5, 13.0 s before")
    assert describe_loss(None, 1000.0) == describe_loss([0, 0, "", "", 987.0], 1000.0) == text.partition("; rank 0")[0]


def test_ranks_in_the_same_phase_are_told_apart_by_their_collectives() -> None:
    text = describe_ranks({0: seen(5), 1: seen(5)}, 0, 1000.0, [1])
    assert text.startswith(
        "rank 1 on node5 hangs or lags: in step 7 (saving) for 100 s; the other ranks wait for it in a"
    )


@pytest.mark.parametrize(
    ("last", "behind"),
    [
        ([{"world": 7}, {"world": 7}], []),
        ([{"world": 7}, {"world": 6}], [1]),
        # Rank 3 has stopped. Rank 2 waits for it in their tp group, ranks 0 and 1 wait for both in their dp groups.
        ([{"tp0": 5, "dp0": 9}, {"tp0": 5, "dp1": 9}, {"tp1": 5, "dp0": 8}, {"tp1": 4, "dp1": 8}], [3]),
        ([{"world": 7, "only 0": 3}, {"world": 7}], []),
        ([{"world": 8}, {"world": 7}, {"world": 7}], [1, 2]),
        ([{"gloo 0 default_pg": 1}, {"gloo 0 default_pg": 0}], [1]),
        ([{"gloo 0 default_pg": 1}, {}], []),
        ([{"gloo 1 tp": 1}, {}], []),
    ],
)
def test_the_rank_that_waits_for_no_other_is_behind(last: list[dict[str, int]], behind: list[int]) -> None:
    assert ranks_behind(dict(enumerate(last))) == behind


def on_device(states: str, *, started: int = 0) -> int | None:
    """The last number of a rank whose collectives on the device have these states, from number 1 on: c(ompleted),
    s(tarted), e(nqueued). started: of all but the enqueued ones, with the timing of torch."""
    names = {"c": "completed", "s": "started", "e": "scheduled"}
    entries = [
        {
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "state": names[state],
            "time_discovered_started_ns": started * (state != "e"),
        }
        for number, state in enumerate(states, 1)
    ]
    return last_numbers({"nccl": json.dumps({"entries": entries})}).get("nccl 0 default_pg")


def test_a_device_is_where_its_first_collective_has_not_ended() -> None:
    """Its host runs ahead: ranks that have enqueued more are not ahead. A host that hangs has none that waits."""
    assert on_device("cccc") == 4
    assert on_device("ccceee") == on_device("ccce") == 4
    hangs, waits, waits_too = on_device("ccc"), on_device("ccceeeee"), on_device("ccce")
    assert ranks_behind({0: {"w": waits or 0}, 1: {"w": hangs or 0}, 2: {"w": waits_too or 0}}) == [1]
    # With timing, torch also knows of a device that has not come to the collective.
    assert on_device("cccee", started=5) == 3
    assert on_device("cccse", started=5) == 4
    assert on_device("") == 0


def test_all_ranks_are_in_the_default_group() -> None:
    """Also those that have not used it; but not those whose records of it have been dropped for newer ones."""

    def recorded(*numbers: int) -> dict[str, int]:
        """By gloo, of a rank whose entries have these numbers, in another group."""
        entries = [
            {"is_p2p": False, "process_group": ["1", "tp"], "collective_seq_id": number, "record_id": number}
            for number in numbers
        ]
        return last_numbers({"gloo": json.dumps({"entries": entries} if entries else {})})

    assert recorded() == {"gloo 0 default_pg": 0}
    assert recorded(0, 1) == {"gloo 0 default_pg": 0, "gloo 1 tp": 1}
    assert recorded(7, 8) == {"gloo 1 tp": 8}
    used = {"gloo 0 default_pg": 3, "gloo 1 tp": 8}
    assert ranks_behind({0: used, 1: recorded(7, 8)}) == []
    assert ranks_behind({0: used, 1: recorded()}) == [1]
