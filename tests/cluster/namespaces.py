"""Two hosts on this machine, each with its own network, name and /etc/hosts, joined by a link that can be cut."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm import processes, wait_for
from tests.distributed.program import CONFIG, REPOSITORY, clean_environment, read

ADDRESSES = ("10.9.0.1", "10.9.0.2")
PORT = 29500
NAMES = ("w0", "w1")
LEFT_OVER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
"""Variables of a rank, from an earlier shell: a launcher would leave its lines to another rank."""
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{pair[0]} {pair[1]}\n" for pair in zip(ADDRESSES, NAMES, strict=True))


def missing() -> str:
    """Why no namespaces can be made here; "" if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "needs root on Linux"
    absent = [command for command in ("ip", "ss", "unshare") if shutil.which(command) is None]
    return f"needs {', '.join(absent)}" if absent else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """The hosts w0 and w1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spaces = [f"titanlite-{os.getpid()}-{name}" for name in NAMES]
        self.launchers: list[Launcher] = []
        for space in self._spaces:
            ip("netns", "add", space)
        first, second = self._spaces
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def add_ipv6(self) -> None:
        """Give the hosts the addresses fd00::1 and fd00::2."""
        for number, space in enumerate(self._spaces, 1):
            ip("-n", space, "address", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")

    def set_link(self, state: str) -> None:
        """Connect the hosts (up), or cut them off from each other, without a packet that says so (down)."""
        ip("-n", self._spaces[1], "link", "set", "eth0", state)

    def launch(
        self,
        host: int,
        *options: str,
        keys: Sequence[str] = (),
        hosts: str = HOSTS,
        variables: Mapping[str, str] | None = None,
    ) -> "Launcher":
        """Start a launcher on a host, with a long training. hosts: its /etc/hosts."""
        name = f"{NAMES[host]}-{len(self.launchers)}"
        (self.folder / "my.toml").write_text(CONFIG)
        (self.folder / f"{name}.hosts").write_text(hosts)
        python = [sys.executable, "-m", "titanlite.torchrun", *options, "-m", "titanlite.train", "my.toml"]
        training = ["--job.dump_folder", "out", "--training.steps", "100000", *keys]
        host_files = f"hostname {NAMES[host]}; mount --bind {name}.hosts /etc/hosts; mount -t tmpfs tmpfs /run"
        command = ["ip", "netns", "exec", self._spaces[host], "unshare", "-um", "bash", "-c"]
        environment = clean_environment() | LEFT_OVER | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f'{host_files}; exec "$@"', "bash", *python, *training],
                cwd=self.folder,
                env=environment | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.launchers.append(Launcher(process, self.folder / f"{name}.log"))
        return self.launchers[-1]

    def close(self) -> None:
        spaces = [os.stat(f"/run/netns/{space}").st_ino for space in self._spaces]
        for pid in processes():
            try:
                is_ours = os.stat(f"/proc/{pid}/ns/net").st_ino in spaces
            except OSError:  # it has ended
                continue
            if is_ours:
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.process.wait()
        for space in self._spaces:
            ip("netns", "delete", space)


@dataclass
class Launcher:
    """A launcher that was started."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def log(self) -> str:
        return read(self.file)

    def wait_for(self, condition: Callable[[], bool], within_s: float) -> None:
        wait_for(condition, within_s, lambda: self.log)

    def wait(self, within_s: float) -> int:
        """Wait for the launcher and return its exit code; print how long (pytest -s), for docs/reliability.md."""
        begin = time.monotonic()
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {within_s:.0f} s:\n{self.log}") from None
        print(f"{self.file.name}: exit code {code} after {time.monotonic() - begin:.1f} s")
        return code
