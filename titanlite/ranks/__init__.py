"""The ranks of a job: how they start, agree, fail and end. What ends them, and who does what in which order:
docs/reliability.md, "Who ends a job".

| module | content |
|---|---|
| `distributed` | the world from the launcher's environment, timeouts of process groups, idle ranks |
| `network` | the connection of the ranks of an attempt, their process group; why a host cannot be reached |
| `agreement` | facts that must be equal, work that raises on all ranks, flags exchanged at each step |
| `positions` | step, phase, heartbeat and last collectives of each rank in the store; which rank a message names |
| `failure` | which rank prints the error of the job, its message, the exit code |
| `signals` | the thread that never blocks; signals as requests to stop; a rank ends with its launcher |
| `job_lock` | one job at a time in a dump folder |
| `claim` | one job at a time in a checkpoint folder in an object store |
| `launch` | ranks forked by one process, for tests and benchmarks |
| `slurm.sh` | the launchers of a Slurm job, and its requeue; the launchers themselves: `titanlite.torchrun` |

Beside the main thread, a connected rank has two threads for failures:

- `titanlite-store` may block. Twice per second it sends a heartbeat, reads those of the other ranks and whether one has
  printed the error of the job; on request it writes the stacks.
- `titanlite-watch` never blocks. It receives the signals. Twice per second it checks whether the store has answered and
  the ranks have sent heartbeats within `comm.train_timeout_s`, and, where the kernel does not, that the launcher lives.

What they find may end the process after a wait: a thread of its own, `titanlite-end`, does that.
"""
