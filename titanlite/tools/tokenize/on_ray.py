"""Parts as tasks of a Ray cluster: RAY_ADDRESS, else one on this machine that ends with the command."""

import json
import os
import socket
from collections.abc import Generator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from titanlite.data.processes import worker_environment
from titanlite.data.sources.tokens import Shard
from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import load_plugins, loaded_plugins
from titanlite.tools.tokenize.local import arguments_of, opened_job
from titanlite.tools.tokenize.part import tokenize_part
from titanlite.tools.tokenize.plan import Job

RETRIES = 5
"""How often a part is started again after its worker or its node was lost."""

CONNECT_S = 10


def check_ray() -> None:
    """Raise UserError if Ray is not installed, or nothing answers at RAY_ADDRESS."""
    if find_spec("ray") is None:
        raise UserError("--engine ray needs Ray: pip install 'titanlite[ray]'")
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            remedy = "fix it, start the cluster, or unset the variable to start Ray on this machine"
            raise UserError(f"RAY_ADDRESS={address}: nothing answers there ({error}): {remedy}") from None


def run_on_ray(job: Job, parts: Sequence[int], num_workers: int | None) -> Generator[Shard, None, None]:
    """Write parts, each on one CPU; yield their entries in the order in which they are finished.

    num_workers: most tasks at the same time; None: as many as the cluster has CPUs. Raises UserError.
    """
    # Without an address, Ray joins any cluster that has left a file on this machine, even a dead one.
    address = os.environ.get("RAY_ADDRESS") or "local"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address != "local":  # a dead cluster is found after 45 s; by default, after 20 times as long
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    import ray

    try:
        ray.init(
            address=address,
            num_cpus=num_workers if address == "local" else None,
            include_dashboard=False if address == "local" else None,
            log_to_driver=True,
            runtime_env={"env_vars": _settings() | worker_environment()},
        )
    except Exception as error:  # the class of Ray's own, if its processes do not start in time
        if address == "local":
            remedy = "run the same command again, or use --engine local"
            raise UserError(f"cannot start Ray on this machine: {error}; {remedy}") from error
        remedy = "fix RAY_ADDRESS, or unset it; RAY_AUTH_MODE must be that of the cluster"
        raise UserError(f"cannot use the Ray cluster {address}: {error}; {remedy}") from error
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(write_part)
        start = partial(task.remote, json.dumps([loaded_plugins(), arguments_of(job)]))
        room = num_workers or int(ray.cluster_resources().get("CPU", 1))
        waiting, running = list(reversed(parts)), list[Any]()
        while waiting or running:
            running += [start(waiting.pop()) for _ in range(min(len(waiting), room - len(running)))]
            finished, running = ray.wait(running)
            yield from ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(*error.cause.args) from None
        raise
    except ray.exceptions.RayError as error:
        remedy = "run the same command again: finished parts are not done again"
        raise UserError(f"the Ray cluster {address} lost a part {RETRIES + 1} times: {error}; {remedy}") from error
    finally:
        ray.shutdown()


def write_part(arguments: str, part: int) -> Shard:
    """Write a part in a worker of Ray, which does several parts."""
    return tokenize_part(_job(arguments), part)


@cache
def _job(arguments: str) -> Job:
    plugins, own = json.loads(arguments)
    load_plugins(plugins)  # their kinds of sources
    return opened_job(**own)


def _settings() -> dict[str, str]:
    """Variables with settings of the configuration, such as [storage]."""
    names = [name for name in os.environ if name.startswith("TITANLITE_") and name != "TITANLITE_CACHE"]
    return {name: os.environ[name] for name in names}
