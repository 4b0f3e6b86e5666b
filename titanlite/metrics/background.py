"""A thread that hands records to a service, so that no step waits for a network."""

import queue
import threading
from typing import Protocol

from titanlite.metrics.records import LogRecord
from titanlite.runtime.logging import log
from titanlite.runtime.text import one_line

MAX_PENDING = 10_000
CLOSE_S = 60.0
SHOWN_AFTER_S = 2.0
"""A longer wait is announced."""


class Service(Protocol):
    """A logger whose calls may wait for a network. `open` is called first, and all calls come from one thread."""

    name: str

    def open(self) -> None: ...

    def write(self, record: LogRecord) -> None: ...

    def close(self) -> None: ...


class BackgroundSink:
    """Calls a service from a thread of its own.

    An error of the service, or more than MAX_PENDING records that it has not taken, ends it with one warning. `close`
    waits up to CLOSE_S seconds for the pending records.
    """

    def __init__(self, service: Service) -> None:
        self._name = service.name
        self._pending: queue.Queue[LogRecord | None] = queue.Queue(MAX_PENDING)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, args=(service,), name=service.name, daemon=True)
        self._thread.start()

    def write(self, record: LogRecord) -> None:
        """Queue the record; never waits."""
        self._put(record)

    def close(self) -> None:
        """Wait for the pending records, up to CLOSE_S seconds."""
        self._put(None)
        self._thread.join(0 if self._has_failed else SHOWN_AFTER_S)
        if self._thread.is_alive() and not self._has_failed:
            log.info("%s: waiting up to %g s until it has taken all records", self._name, CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive() and not self._has_failed:
            self._warn(f"it has not taken all records within {CLOSE_S:g} s")

    def _put(self, record: LogRecord | None) -> None:
        if self._has_failed:
            return
        try:
            self._pending.put_nowait(record)
        except queue.Full:
            self._warn(f"it has not taken the last {MAX_PENDING:,} records")

    def _run(self, service: Service) -> None:
        try:
            service.open()
            while (record := self._pending.get()) is not None and not self._has_failed:
                service.write(record)
            service.close()
        except (Exception, SystemExit) as error:  # of a plugin; a thread ends silently by a SystemExit
            self._warn(one_line(error))

    def _warn(self, why: str) -> None:
        log.warning("%s: %s; the run continues without it, metrics.jsonl has the same numbers", self._name, why)
        self._has_failed = True
