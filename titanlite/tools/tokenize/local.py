"""Parts in worker processes of this machine.

A worker is a separate process (see data/processes.py) that imports no torch.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from titanlite.data.config import DataConfig
from titanlite.data.processes import Arrays, WorkerProcess, run_worker
from titanlite.data.sources.tokens import Shard
from titanlite.runtime.errors import UserError
from titanlite.tools.tokenize.folder import LocalFolder, output_folder
from titanlite.tools.tokenize.part import tokenize_part
from titanlite.tools.tokenize.plan import MADE_WITH, Job, read_plan


def arguments_of(job: Job) -> dict[str, Any]:
    """The arguments of opened_job, as JSON, from which any process makes the same job."""
    out = str(job.out.path.absolute()) if isinstance(job.out, LocalFolder) else str(job.out)
    return {"out": out, "section": asdict(job.section)}


def opened_job(*, out: str, section: dict[str, Any]) -> Job:
    """The job of a worker. Raises UserError."""
    folder = output_folder(out)
    plan = read_plan(folder)
    if plan is None:
        raise UserError(f"{folder} has no plan any more: another command has completed or removed it")
    if plan["made_with"] != MADE_WITH:
        versions = [", ".join(f"{name} {each[name]}" for name in each) for each in (plan["made_with"], MADE_WITH)]
        raise UserError(f"the plan is of {versions[0]}, but this worker has {versions[1]}: use one version")
    return Job(folder, TypeAdapter(DataConfig).validate_python(section), folder.open_tokenizer(), plan)


def run_locally(job: Job, parts: Sequence[int], num_workers: int) -> Generator[Shard, None, None]:
    """Write parts; yield their entries in the order in which they are finished. 0 workers: in this process.

    Raises UserError if a worker is killed. The workers end with the iterator.
    """
    if num_workers == 0:
        yield from (tokenize_part(job, part) for part in parts)
        return
    num_workers = min(num_workers, len(parts))
    remedy = "use fewer --workers, and run the same command again: finished parts are not done again"
    workers = deque[WorkerProcess]()
    threads = ThreadPoolExecutor(max(1, num_workers))

    def write(part: int) -> Shard:
        worker = workers.popleft()  # there are as many threads as workers
        try:
            worker.send(part)
            entry: Shard = worker.receive()[0]
        finally:
            workers.append(worker)
        return entry

    started: list[WorkerProcess] = []
    try:
        for _ in range(num_workers):
            started.append(WorkerProcess("titanlite.tools.tokenize.local", arguments_of(job), remedy))
        workers.extend(started)
        for future in as_completed([threads.submit(write, part) for part in parts]):
            yield future.result()
    finally:
        for worker in started:
            worker.close()
        threads.shutdown(cancel_futures=True)  # no thread waits for a killed worker


def written_parts(parts: Iterator[int], *, out: str, section: dict[str, Any]) -> Iterator[tuple[Any, Arrays]]:
    """Write the parts that are requested, in a worker process."""
    job = opened_job(out=out, section=section)
    for part in parts:
        yield tokenize_part(job, part), {}


if __name__ == "__main__":
    run_worker(written_parts)
