"""What identifies a run and each of its starts: run.json, and the facts that all loggers get."""

import json
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, Field
from typing_extensions import TypedDict

from titanlite.metrics.config import RUN_FILE
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_json
from titanlite.runtime.logging import log

GIT_S = 10.0
"""Time for git, whose repository may be on a slow file system."""


class RunJson(TypedDict):
    """Content of run.json. starts: of each one its step, its time and its facts."""

    run_id: str
    starts: list[dict[str, Any]]


@dataclass(frozen=True)
class Started:
    """One start, as RunJson has it among its facts. step: from which it resumed; 0: a new run. mesh: degree of each
    axis."""

    step: Annotated[int, Field(ge=0, lt=2**63)]
    moment: Annotated[AwareDatetime, Field(validation_alias="time")]
    mesh: Mapping[str, Annotated[int, Field(ge=1, lt=2**31)]]


class _Starts(TypedDict):
    starts: list[Started]


@dataclass(frozen=True)
class AboutRun:
    """facts: run_id, git_commit, hosts and versions, without unknown ones. config: full key -> value, resolved.
    config_toml: the same as a file."""

    facts: Mapping[str, str]
    config: Mapping[str, bool | int | float | str]
    config_toml: str

    @property
    def run_id(self) -> str:
        return self.facts["run_id"]


def note_start(folder: Path, resume_step: int, facts: Mapping[str, Any], *, trains: bool = True) -> str:
    """Append this start, with its facts, to run.json; return the run's id. trains: False changes no file.

    resume_step: 0 for a new run, which draws an id. A resumed run keeps the id of the file; if the file is lost or
    damaged, it draws a new one. Raises UserError if the file cannot be written.
    """
    now = datetime.now().astimezone()
    path = folder / RUN_FILE
    run = RunJson(run_id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}", starts=[])
    if resume_step:
        try:
            run = read_json(path, RunJson)
        except (OSError, JsonError):
            log.warning("%s is lost or damaged: the loggers show this start as another run, %s", path, run["run_id"])
    if not trains:
        return run["run_id"]
    run["starts"].append({"step": resume_step, "time": now.isoformat(timespec="seconds"), **facts})
    try:
        replace_file(path, (json.dumps(run, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return run["run_id"]


def read_starts(folder: Path) -> list[Started]:
    """The starts of a run, in order; [] if run.json is damaged. Raises OSError."""
    try:
        found: _Starts = read_json(folder / RUN_FILE, _Starts)
    except FileNotFoundError:
        return []
    except JsonError as error:
        log.warning("%s is damaged: its starts are left out: it %s", folder / RUN_FILE, error)
        return []
    return found["starts"]


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes with more than one rank, such as `dp_shard 2, tp 2`."""
    return ", ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1) or "one process"


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in the repository of `folder`; None outside of a repository, and without git.

    Uncommitted changes are not seen.
    """
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"]
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=GIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode().strip()
