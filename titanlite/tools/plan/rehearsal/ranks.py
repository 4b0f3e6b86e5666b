"""Which ranks of a job are rehearsed, and their processes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from titanlite.data.processes import worker_environment
from titanlite.planning.estimate import Estimate
from titanlite.runtime.errors import UserError

MODULE = "titanlite.tools.plan.rehearsal"


def chosen_ranks(world_size: int, pp: int, plan: Estimate | None) -> list[int]:
    """The ranks that can differ: the first one of the first and the last stage and of that with the most memory by the
    plan; and the last one of all, which has the last of uneven shards, and the last experts."""
    most = 0 if plan is None else plan.largest.pp_rank
    return sorted({*(stage * (world_size // pp) for stage in (0, most, pp - 1)), world_size - 1})


def rehearse_in_processes(
    words: Sequence[str], world_size: int, ranks: Sequence[int], *, stage: int, memory_bytes: int
) -> dict[int, dict[str, Any]]:
    """The results of each rank, see the function `described` of the process, or {"error": ..., "place": ...}.

    words: --job.config_file and overrides. stage: of training, from 0. As many processes at once as there are cores.
    Raises UserError if a process ends without an answer.
    """

    def rehearse(rank: int) -> dict[str, Any]:
        request = {"words": list(words), "world_size": world_size, "rank": rank}
        request |= {"stage": stage, "memory_bytes": memory_bytes}
        ended = subprocess.run(
            [sys.executable, "-P", "-m", MODULE],
            input=json.dumps(request) + "\n",
            env=os.environ | worker_environment() | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0 or not ended.stdout:
            last = ended.stderr.strip().splitlines()[-3:]
            how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
            raise UserError(f"the rehearsal of rank {rank} ended with {how}: it may have run out of memory", *last)
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(ranks, pool.map(rehearse, ranks), strict=True))
