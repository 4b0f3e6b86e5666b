"""Elastic runs: the time from the loss of a node, and from the start of one that joins, to the next step.

Two launchers on this machine train the quick start's model, with one rank each and the settings of
`titanlite/torchrun/`. In each round, the second one is killed with its rank, and started again. A step ends the time
when its row is in metrics.jsonl. "stopped" is the part without steps, as counted by time_s/restart.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from json import loads
from pathlib import Path
from typing import Any

from benchmarks.measuring import Row, report

PATIENCE_S = 300.0
CONFIG = (
    *("quickstart", "--training.steps", "1000000", "--training.seq_len", "64", "--metrics.log_freq", "1"),
    *("--checkpoint.enable", "true", "--checkpoint.interval", "5", "--validation.enable", "false"),
)


def start_node(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start a launcher with one rank, in a session of its own, whose output goes to a file."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic")
    launcher = (*("-m", "titanlite.torchrun", "--nnodes", "1:2", "--max-restarts", "1000"), *rendezvous)
    training = ("-m", "titanlite.train", *CONFIG, "--job.dump_folder", str(folder / "out"))
    with (folder / "nodes.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, *training],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill(node: "subprocess.Popen[bytes]") -> None:
    """Kill a launcher and its rank at once."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for pid in (node.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    node.wait()


def row_after(folder: Path, restart_s: float, steps: int = 1) -> dict[str, Any]:
    """Wait for the row `steps` rows after the first one that has lost more time to restarts; restart_s: -1: for any."""
    path, end = folder / "out" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        lines = path.read_text().splitlines() if path.exists() else []
        rows: list[dict[str, Any]] = [loads(line) for line in lines]
        found = [row for row in rows if row["time_s/restart"] > restart_s]
        if len(found) >= steps:
            return found[steps - 1]
        time.sleep(0.05)
    raise TimeoutError((folder / "nodes.log").read_text()[-2000:])


def main(rounds: int = 3, json: Path | None = None) -> None:
    """rounds: losses and joins. json: folder of elastic.json."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    nodes = []
    until_next: dict[str, list[float]] = {"loss": [], "join": []}
    stopped: dict[str, list[float]] = {"loss": [], "join": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            nodes.append(start_node(folder, port))
            row_after(folder, -1)
            nodes.append(start_node(folder, port))
            last = row_after(folder, 0.0, steps=5)
            for _ in range(rounds):
                for event in until_next:
                    begin = time.time()
                    if event == "loss":
                        kill(nodes.pop())
                    else:
                        nodes.append(start_node(folder, port))
                    restart_s = last["time_s/restart"]
                    first = row_after(folder, restart_s)
                    until_next[event].append(first["unix_time"] - begin)
                    stopped[event].append(first["time_s/restart"] - restart_s)
                    last = row_after(folder, restart_s, steps=5)
        finally:
            for node in nodes:
                kill(node)
    rows: list[Row] = [
        {"event": event, "until the next step": until_next[event], "stopped": stopped[event]} for event in until_next
    ]
    report("elastic", {"Seconds, of two nodes with a rank each": rows}, json)
