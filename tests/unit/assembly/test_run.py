"""The dump folder: checkpoints of an earlier run, and files that cannot be written."""

from pathlib import Path

import pytest

from titanlite.assembly.run import prepare_outputs, require_no_checkpoints
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.start import Start
from titanlite.config.load import CONFIG_COPY
from titanlite.config.schema import JobConfig, JobSection
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError


def start(dump_folder: Path, folder: str, *, enable: bool = True) -> None:
    section = CheckpointConfig(enable=enable, folder=folder)
    require_no_checkpoints(JobConfig(job=JobSection(dump_folder=str(dump_folder)), checkpoint=section))


@pytest.mark.parametrize(
    ("earlier", "now"),
    [("checkpoint", "other"), ("checkpoint", "checkpoint/x"), ("a/b", "checkpoint"), ("a/b", "a"), ("a/b", "a/b/c")],
)
def test_a_run_beside_the_checkpoints_of_another_is_refused(tmp_path: Path, earlier: str, now: str) -> None:
    start(tmp_path / "missing", now)
    (tmp_path / earlier / "step-6").mkdir(parents=True)
    (tmp_path / CONFIG_COPY).write_text(f'checkpoint.folder = "{earlier}"')
    start(tmp_path, earlier)
    message = f"but {tmp_path / earlier} holds .* resume it with --checkpoint.folder {earlier},"
    with pytest.raises(UserError, match=message):
        start(tmp_path, now)
    with pytest.raises(UserError, match=r"checkpoint\.enable = false, but"):
        start(tmp_path, earlier, enable=False)


def test_a_folder_in_place_of_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CONFIG_COPY / "x").mkdir(parents=True)
    config = JobConfig(job=JobSection(dump_folder=str(tmp_path)))
    message = f"job.dump_folder: cannot write {tmp_path / CONFIG_COPY}: Is a directory; fix this, or give another"
    with pytest.raises(UserError, match=message):
        prepare_outputs(config, World(0, 0, 1, "cpu"), Start(5, (), {}, resumes=True), None)
