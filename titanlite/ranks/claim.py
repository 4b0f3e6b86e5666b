"""Claim of a checkpoint folder in an object store: one job at a time writes there. The counterpart of job_lock.

`<folder>/job.lock/<number>.json` names an owner, as job.lock does. A job takes the folder by creating the next number,
which a store lets only one job do; the largest number is the claim. Its owner writes `<token>.beat` every BEAT_S
seconds, and "released" at its end. No clocks are compared: a waiting job watches the heartbeat itself. An owner that
was stopped for longer, and has lost the folder meanwhile, finds that before it writes the next heartbeat, and ends.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from titanlite.ranks.job_lock import JOB_LOCK_FILE, WAIT_S, Owner, parse_owner, state_of, this_process
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.storage.address import Address
from titanlite.storage.probe import probe
from titanlite.storage.store import Store

BEAT_S = 10.0
SILENT_S = 90.0
"""Without a heartbeat for so long, an owner on another host has ended. Longer than one request that is not answered."""
POLL_S = 1.0
SETTLE_S = 5.0
"""Without conditional puts: from the write of a claim until it is read again. Claims written meanwhile replace it."""
_RELEASED = b"released"


class _Claim(NamedTuple):
    """number: 0 if there is none. owner: None if there is none, or its object is damaged. beat: the heartbeat."""

    number: int
    owner: Owner | None = None
    beat: bytes = b""


@contextmanager
def claim(
    folder: Address,
    rank: int,
    *,
    take_over: bool,
    environment: Mapping[str, str],
    on_lost: Callable[[str], object],
    wait_s: float = WAIT_S,
) -> Iterator[None]:
    """Context in which this job is the only one that writes checkpoints into `folder`.

    By the rules of `job_lock`, except that an owner whose host cannot be checked has ended if its heartbeat is silent
    for SILENT_S seconds. Only rank 0 takes part. It first probes the folder: raises UserError if permissions are
    missing, and if the folder has another owner. on_lost: called in a thread, with the message, if another job has
    taken over the folder.
    """
    if rank != 0:
        yield
        return
    store = Store(folder)
    try:
        conditional = probe(store)
    except UserError as error:
        raise UserError(f"checkpoint.folder: {error}") from None
    if not conditional:
        log.warning(
            "%s: the store has no conditional put; jobs that start within the same %.0f s may all train until the "
            "next heartbeat of the first, and a job that was taken over while it saves may replace a checkpoint",
            *(folder, SETTLE_S),
        )
    mine = this_process(environment)
    number = _acquire(store, mine, take_over, wait_s, 0.0 if conditional else SETTLE_S)
    heartbeat = _Heartbeat(store, number, mine, on_lost)
    try:
        yield
    finally:
        heartbeat.stop()


def require_claim(folder: Address) -> None:
    """Raise UserError if another job has taken over the claim of this process."""
    owner = _latest(Store(folder)).owner
    if owner is not None and owner.place != this_process({}).place:
        raise UserError(_lost(folder, owner))


def _lost(folder: Address, owner: Owner) -> str:
    return (
        f"checkpoint.folder: {folder} was taken over by {owner}, while this job ran: this job ends, and saves nothing "
        "more"
    )


def _acquire(store: Store, mine: Owner, take_over: bool, wait_s: float, settle_s: float) -> int:
    """The number of this job's claim."""
    folder, start = store.address, time.monotonic()
    watched, since, logged = _latest(store), start, False
    while True:
        found, now = _latest(store), time.monotonic()
        number, owner, beat = found
        beats = watched[:2] == found[:2] and watched.beat != beat
        if watched != found:
            watched, since = found, now
        free = number == 0 or beat == _RELEASED
        state = "ended" if free else state_of(owner, mine) if owner else "unknown"
        silent = owner is not None and now - since >= SILENT_S
        if state == "ended" or (state == "unknown" and (take_over or silent)):
            if _create(store, number + 1, mine, settle_s):
                ended, asked = "has ended without releasing the folder", "may run: job.take_over = true"
                why = ended if state == "ended" else f"is silent for {SILENT_S:.0f} s" if silent else asked
                if not free:
                    log.warning("%s: taken over; the job of %s %s", folder, owner or "an unknown process", why)
                return number + 1
            continue
        is_this_process = owner and owner.place == mine.place
        if owner is None or beats or is_this_process or (state == "running" and now - start >= wait_s):
            raise UserError(_refusal(folder, owner, beats))
        if not logged:
            waits_s = wait_s if state == "running" else SILENT_S
            log.info("%s is in use by %s; waiting up to %.0f s for it to end", folder, owner, waits_s)
            logged = True
        time.sleep(POLL_S)


def _refusal(folder: Address, owner: Owner | None, beats: bool) -> str:
    another = "give another checkpoint.folder"
    if owner is None:
        return (
            f"checkpoint.folder: {folder / JOB_LOCK_FILE} is damaged, so the job that uses the folder is unknown; "
            f"{another}, or pass --job.take_over true if no job uses it"
        )
    heartbeat = "; its heartbeat continues" if beats else ""
    return f"checkpoint.folder: {folder} is in use by another job: {owner}{heartbeat}; {another}, or end that job first"


def _create(store: Store, number: int, mine: Owner, settle_s: float) -> bool:
    """Whether this job has the claim `number`, and no later one exists."""
    try:
        store.create(f"{JOB_LOCK_FILE}/{number}.json", mine.encode())
    except FileExistsError:
        return False
    time.sleep(settle_s)
    return _latest(store)[:2] == (number, mine)


def _latest(store: Store) -> _Claim:
    """The claim as it is now."""
    names = [name.removesuffix(".json") for name in store.children(JOB_LOCK_FILE) if name.endswith(".json")]
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    if number == 0:
        return _Claim(0)
    try:
        owner = parse_owner(store.read(f"{JOB_LOCK_FILE}/{number}.json"))
    except FileNotFoundError:  # the owner of a later claim has deleted it meanwhile
        return _latest(store)
    try:
        return _Claim(number, owner, store.read(_beat(owner)) if owner else b"")
    except FileNotFoundError:
        return _Claim(number, owner)


def _beat(owner: Owner) -> str:
    return f"{JOB_LOCK_FILE}/{owner.token}.beat"


class _Heartbeat:
    """Thread that writes the heartbeat of the owner `mine` of the claim `number`, after it has deleted earlier ones."""

    def __init__(self, store: Store, number: int, mine: Owner, on_lost: Callable[[str], object]) -> None:
        self._store, self._number, self._mine, self._on_lost = store, number, mine, on_lost
        self._end, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="titanlite-claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        while not self._end.wait(BEAT_S if count else 0.0):
            try:
                owner = _latest(self._store).owner
                if owner and owner.token != self._mine.token:
                    self._lost = True
                    self._on_lost(_lost(self._store.address, owner))
                    return
                self._store.write(_beat(self._mine), b"%d" % count)
                if count == 0:
                    self._delete_earlier()
            except UserError as error:
                log.warning("%s", error)
            count += 1

    def _delete_earlier(self) -> None:
        for name in self._store.children(JOB_LOCK_FILE):
            text, _, kind = name.partition(".")
            earlier = text.isdecimal() and int(text) < self._number if kind == "json" else text != self._mine.token
            if earlier:
                self._store.delete([f"{JOB_LOCK_FILE}/{name}"])

    def stop(self) -> None:
        """Release the claim. A process forked from the owner leaves it alone."""
        if self._mine.pid != os.getpid():
            return
        self._end.set()
        self._thread.join(BEAT_S)
        if self._lost or self._thread.is_alive():  # alive: in a request without an answer; then silence ends the claim
            return
        try:
            self._store.write(_beat(self._mine), _RELEASED)
        except UserError as error:
            log.warning("%s", error)
