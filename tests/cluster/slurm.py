"""A real Slurm on this machine: its daemons, two nodes "n1" and "n2", and jobs. Needs root, slurm-wlm and munge.

Each node is a slurmd in a mount namespace of its own, whose /etc/hosts has the nodes' names. The namespace also tells
which processes belong to a node, so that a node can be lost.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.program import clean_environment, free_port, read

NODES = ("n1", "n2")
PRIVATE = "private"
"""A folder whose files each node has for itself."""
GRACE_S = 60
"""GraceTime of the partition "all"; "nograce" has none, and "high" preempts both."""
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=30
ReturnToService=2
MinJobAge=3600
TCPTimeout=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s}
PartitionName=nograce Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:1\n"
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def missing() -> str:
    """Why no Slurm can be started here; "" if it can."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    return "needs root" if os.geteuid() else f"needs {', '.join(absent)}" if absent else ""


class Slurm:
    """A running Slurm, whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = os.uname().nodename.partition(".")[0]
        text = CONFIG.format(host=host, port=free_port(), folder=folder, grace_s=GRACE_S)
        for name in NODES:
            (folder / f"spool.{name}").mkdir()
            text += NODE.format(name=name, host=host, port=free_port(), cpus=os.cpu_count())
        for name in ("state", PRIVATE):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(text)
        (folder / "gpu").touch()  # any file serves as a GPU
        (folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu\n")
        (folder / "cgroup.conf").write_text(CGROUP)
        names = "".join(f"127.0.0.1 {name}\n" for name in NODES)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        self.environment = clean_environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "munged", "--force", "--foreground", *options)
        wait_for(lambda: (folder / "munge.socket").exists(), 10)
        self._start("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        wait_for(lambda: self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%T").split() == ["idle"] * len(NODES), 30)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, also again after it was lost."""
        mounts = f"mount --bind '{self.folder}/hosts' /etc/hosts && mount -t tmpfs tmpfs '{self.folder}/{PRIVATE}'"
        script = f"{mounts} && exec slurmd -D -N {name}"
        self._start(name, "unshare", "-m", "bash", "-c", script)

    def write(self, node: str, file: str, content: bytes) -> None:
        """Write a file into the folder PRIVATE of a node."""
        Path(f"/proc/{self._daemons[node].pid}/root{self.folder}/{PRIVATE}/{file}").write_bytes(content)

    def kill_slurmd(self, name: str) -> None:
        """Kill the slurmd of a node, while the processes of its jobs go on."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def lose_node(self, name: str) -> None:
        """Kill all processes of a node, as a loss of its power does."""
        namespace = os.readlink(f"/proc/{self._daemons[name].pid}/ns/mnt")
        for process in processes():
            if _namespace(process) == namespace:
                os.kill(process, signal.SIGKILL)
        self._daemons.pop(name).wait()

    def run(self, *command: str) -> str:
        """Run a command of Slurm; return its output."""
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        return done.stdout

    def submit(self, folder: Path, *words: str, variables: dict[str, str]) -> "Job":
        """Submit `sbatch WORDS` in a folder; its log is FOLDER/log."""
        command = ["sbatch", "--parsable", f"--output={folder}/log", *words]
        done = subprocess.run(
            command, env=self.environment | variables, cwd=folder, capture_output=True, text=True, check=True
        )
        return Job(self, done.stdout.strip(), folder)

    def preempt(self) -> None:
        """Submit a job on all nodes that preempts all others and ends at once."""
        words = ("--partition=high", "--exclusive", f"--nodes={len(NODES)}", "--output=/dev/null", "--wrap=true")
        self.run("sbatch", *words)

    def close(self) -> None:
        self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root")
        self.run("scancel", "--user=root")
        wait_for(lambda: not self.run("squeue", "-h"), 60)
        for daemon in self._daemons.values():
            daemon.terminate()
            daemon.wait()


@dataclass(frozen=True)
class Job:
    """A job that was submitted. id: of a task of an array, ARRAY_TASK."""

    slurm: Slurm
    id: str
    folder: Path

    @property
    def log(self) -> str:
        return read(self.folder / "log")

    def fact(self, name: str) -> str:
        """A value that `scontrol show job` prints, as JobState."""
        found = re.search(rf"\b{name}=(\S*)", self.slurm.run("scontrol", "show", "job", "--oneliner", self.id))
        return found[1] if found else ""

    @property
    def state(self) -> str:
        return self.fact("JobState")

    def wait_for_state(self, *states: str, within_s: float = 120) -> str:
        """Wait for one of the states; print how long (pytest -s), for the table of docs/reliability.md."""
        begin = time.monotonic()
        wait_for(lambda: self.state in states, within_s, lambda: f"{self.state}\n{self.log}")
        print(f"{self.folder.parent.name}: {self.state} after {time.monotonic() - begin:.0f} s")
        return self.state

    def wait_for_log(self, pattern: str, within_s: float = 120) -> None:
        wait_for(lambda: re.search(pattern, self.log) is not None, within_s, lambda: self.log)

    def start_now(self) -> None:
        """Begin a requeued job, which would wait for two minutes."""
        self.wait_for_state("PENDING")
        wait_for(lambda: self.fact("Reason") == "BeginTime", 60, lambda: f"{self.state}\n{self.log}")
        time.sleep(3)  # a node refuses a job in the second in which it killed it
        self.slurm.run("scontrol", "update", f"jobid={self.id}", "StartTime=now")

    def signal(self, name: str) -> None:
        """Signal the script, as Slurm does before the time limit."""
        self.slurm.run("scancel", f"--signal={name}", "--batch", self.id)

    def launchers(self) -> list[int]:
        """PIDs of the launchers."""
        return [pid for pid in processes() if "\0-m\0titanlite.torchrun\0" in _command(pid, self)]


def _command(pid: int, job: Job) -> str:
    """Command line of a Python process that runs for a job; else empty."""
    command = read(Path(f"/proc/{pid}/cmdline"))
    is_python = command.partition("\0")[0].rpartition("/")[2].startswith("python")
    is_of_job = f"\0SLURM_JOB_ID={job.id}\0" in read(Path(f"/proc/{pid}/environ"))
    return command if is_python and is_of_job else ""


def processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:  # it has ended
        return ""


def wait_for(condition: Callable[[], bool], within_s: float, describe: Callable[[], str] = str) -> None:
    """Wait until the condition holds; fail with the description after some time."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, describe()
        time.sleep(0.1)
