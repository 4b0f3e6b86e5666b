"""The process of one rank of `titanlite plan --rehearse`: one line of JSON on standard input, one on standard output.
Not a command."""

import json
import os
import resource
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from titanlite.config.load import parse, resolve
from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_configs
from titanlite.planning.automatic import fit_memory
from titanlite.planning.communication import Traffic
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.runtime.memory import peak_memory_bytes
from titanlite.tools.plan.rehearsal.rank import CPU, Rehearsal, rehearse
from titanlite.tools.plan.rehearsal.start import files_of, opens_of, planned_opens, planned_requests, requests_of

_LIBRARIES = ("/torch/", "/titanlite/tools/plan/", "<frozen")


def main() -> None:
    """Rehearse a rank. Whatever the program prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        config, ranks, rank = config_of(request), request["world_size"], request["rank"]
        node = min(request["node"], ranks)
        start = described_start(config, World(rank, rank % node, ranks, "cuda", node))
        found = described(rehearse(config, ranks, rank)) | {"start": start, **cost()}
    except UserError as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "place": _place(error)}
    print(json.dumps(found), file=answer, flush=True)


def _end_with_parent() -> None:
    """It has ended, or is interrupted, if it closes the standard input."""
    sys.stdin.read()
    os._exit(1)


def config_of(request: dict[str, Any]) -> JobConfig:
    """The training stage of the configuration that is rehearsed. Raises ConfigError."""
    world_size = request["world_size"]
    config = resolve(parse(request["words"]), world_size=world_size, device_type="cuda", checks_files=False)
    config = fit_memory(config, world_size, device_type="cuda", memory_bytes=request["memory_bytes"])
    stage: int = request["stage"]
    return stage_configs(config)[stage]


def described_start(config: JobConfig, world: World) -> dict[str, int]:
    """What the start of the rank asks for, as JSON. Raises UserError."""
    files, of_tokens = files_of(config)
    is_first = world.local_rank == 0
    token_files, opens = (0, 0) if of_tokens is None else opens_of(of_tokens, is_first=is_first)
    requests, keys = requests_of(world)
    return {
        "requests": requests,
        "planned_requests": planned_requests(world),
        "keys": keys,
        "data_files": files,
        "token_files": token_files,
        "opens": opens,
        "planned_opens": planned_opens(token_files, is_first=is_first),
    }


def cost() -> dict[str, int]:
    """CPU seconds and the peak of the resident memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": round(used.ru_utime + used.ru_stime), "resident_mib": peak_memory_bytes(CPU) // 2**20}


def described(found: Rehearsal) -> dict[str, Any]:
    """The rehearsal as JSON."""
    plan = found.plan
    planned: dict[tuple[str, str], Traffic] = {}
    if plan is not None:
        planned = {(each.axis, each.operation): each for each in plan.traffic}
    return {
        "microbatches": found.microbatches[0],
        "microbatches_of_the_job": found.microbatches[1],
        "peak_bytes": found.peak,
        "groups": dict(found.groups),
        "further_bytes": found.further,
        "planned_peak_bytes": None if plan is None else plan.memory.total,
        "bytes": dict(found.kinds),
        "planned_bytes": None if plan is None else dict(plan.memory.items),
        "collectives": [
            {
                "axis": axis,
                "operation": operation,
                "calls": found.collectives.get((axis, operation), (0, 0))[0],
                "bytes": found.collectives.get((axis, operation), (0, 0))[1],
                "planned_calls": each.calls if (each := planned.get((axis, operation))) else 0,
                "planned_bytes": each.bytes if each else 0,
            }
            for axis, operation in sorted({*planned, *found.collectives})
        ],
        "order": found.order,
        "host_reads": dict(found.host_reads),
        "mixed_devices": dict(found.mixed),
        "saved_tensors": found.saved[0],
        "saved_bytes": found.saved[1],
    }


def _place(error: BaseException) -> str:
    """FILE:LINE of the last code in a traceback that is not torch's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _LIBRARIES)
    ]
    return f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""


if __name__ == "__main__":
    main()
