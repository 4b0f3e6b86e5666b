"""Which ranks and training stages of a job are rehearsed, and their processes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from tempfile import TemporaryFile
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_configs
from titanlite.data.processes import worker_environment
from titanlite.parallel.mesh import ParallelismConfig, resolve_degrees
from titanlite.planning.estimate import Estimate, plan_step
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.text import visible

MODULE = "titanlite.tools.plan.rehearsal"
Found = dict[str, Any]
"""What the process of a rank answers: see the function `described` of the process; or {"error": ..., "place": ...}."""


def chosen_ranks(world_size: int, section: ParallelismConfig, plan: Estimate | None) -> list[int]:
    """The ranks that can differ: the first one of the first and the last stage and of that with the most memory by the
    plan; the last one of all, which has the last of uneven shards; with ep, also the last one of the stage with the
    most memory, which has its last experts."""
    of_stage, most = world_size // section.pp, 0 if plan is None else plan.largest.pp_rank
    firsts = {stage * of_stage for stage in (0, most, section.pp - 1)}
    of_experts = {(most + 1) * of_stage - 1} if section.ep > 1 else set[int]()
    return sorted({*firsts, *of_experts, world_size - 1})


def chosen_stages(config: JobConfig, world_size: int, largest: int) -> list[int]:
    """The training stages that a rehearsal can tell apart, from 0: by the length of sequences, and the number and the
    size of microbatches as far as they are rehearsed. The one that needs the most memory, `largest`, comes first."""
    sizes, stages = resolve_degrees(config.parallelism, world_size), stage_configs(config)
    found: dict[tuple[int, ...], int] = {}
    for number in [largest, *range(len(stages))]:
        step = plan_step(stages[number], sizes)
        few = min(step.microbatches, most_microbatches(config.parallelism))
        found.setdefault((stages[number].training.seq_len, step.size, few), number)
    return [*found.values()]


def most_microbatches(section: ParallelismConfig) -> int:
    """Microbatches of a rehearsed step: more of them repeat these."""
    return 2 * section.pp


def require_rehearsable(config: JobConfig) -> None:
    """Raise ConfigError if the configuration has what no rehearsal can show."""
    recompute = config.activation_checkpoint
    if recompute.mode == "memory_budget":
        rule = "not with --rehearse: the compiler chooses what blocks keep, and a rehearsal compiles nothing"
        remedy = "rehearse with mode = full, or selective; its memory is that of titanlite plan"
        raise ConfigError([Problem("activation_checkpoint.mode", recompute.mode, rule, remedy)])


class Processes:
    """The processes of ranks, as many at once as there are cores.

    words: --job.config_file and overrides. node: ranks of a node.
    """

    def __init__(self, words: Sequence[str], world_size: int, *, node: int, memory_bytes: int) -> None:
        self._request = {"words": list(words), "world_size": world_size, "node": node, "memory_bytes": memory_bytes}
        self._running = list[subprocess.Popen[str]]()
        self._has_ended = False

    def rehearse(self, ranks: Sequence[int], stages: Sequence[int]) -> dict[int, dict[int, Found]]:
        """What the ranks do in each of these stages, by stage and rank. Raises UserError if a process ends without an
        answer; the others are then killed, as on Ctrl-C."""
        jobs = [(stage, rank) for stage in stages for rank in ranks]
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            futures = {job: pool.submit(self._answer, job) for job in jobs}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in futures.values():
                if future.done():
                    future.result()
            answers = {job: future.result() for job, future in futures.items()}
        finally:
            self._has_ended = True
            for process in self._running:
                process.kill()
            pool.shutdown(cancel_futures=True)
        return {stage: {rank: answers[stage, rank] for rank in ranks} for stage in stages}

    def _answer(self, job: tuple[int, int]) -> Found:
        stage, rank = job
        with TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            self._running.append(process)
            if self._has_ended:  # while it started
                process.kill()
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin, process.stdout:  # it ends when its input is closed
                try:
                    process.stdin.write(json.dumps(self._request | {"stage": stage, "rank": rank}) + "\n")
                    process.stdin.flush()
                    answer = process.stdout.read()
                except BrokenPipeError:  # it ended before it has read
                    answer = ""
                code = process.wait()
            errors.seek(0)
            if code == 0 and answer:
                found: Found = json.loads(answer)
                return found
            last = [visible(line) for line in errors.read().strip().splitlines()[-3:]]
        how = f"signal {-code}: it may have run out of memory" if code < 0 else f"exit code {code}"
        raise UserError(f"the rehearsal of rank {rank} ended with {how}", *last)


def _environment() -> Mapping[str, str]:
    """One thread, and no rank of a launcher."""
    of_launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    environment = {name: value for name, value in os.environ.items() if name not in of_launcher}
    return environment | worker_environment() | {"OMP_NUM_THREADS": "1"}
