"""Trainings in this process, in place of those that commands start as processes of their own."""

import json
from pathlib import Path

import titanlite
from titanlite.runtime.errors import UserError
from titanlite.tools.sweep.combinations import Run


class TrainingHere:
    """In place of titanlite.tools.sweep.training.start_run: trains in this process, on one rank."""

    def __init__(self, run: Run, processes: int, error_file: Path | None = None) -> None:
        assert processes == 1
        self.code = 0
        try:
            titanlite.run(run.config)
        except UserError as error:
            if error_file is not None:
                error_file.write_text(json.dumps({"message": {"message": f"titanlite: {error}"}}))
            self.code = 1

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return self.code
