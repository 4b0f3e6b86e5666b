"""The *.py files of the running interpreter's standard library, a corpus available on every machine."""

import os
import sysconfig
from pathlib import Path
from typing import Any

from titanlite.data.sources.pieces import BadRowError, utf8_text
from titanlite.data.sources.stored import read_range
from titanlite.data.sources.text import Text
from titanlite.runtime.errors import Problem, Rules, UserError

HELD_OUT_EVERY = 20
"""Every HELD_OUT_EVERY-th file belongs to the split "validation"."""


class PythonStdlib(Text):
    """A document is a file. The splits count only UTF-8 files, so they are known after the files are read."""

    kind = "python-stdlib"
    keys = ("split",)
    suffixes = (".py",)
    needs_path = False

    @property
    def name(self) -> str:
        return self.config.name or f"python-stdlib ({self._split})"

    @property
    def _split(self) -> str:
        return self.config.split or "train"

    def _find_files(self) -> list[Path]:
        """The files of both splits, without tests and installed packages, sorted by relative path."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files: list[Path] = []
        for folder, names, file_names in os.walk(root):
            names[:] = [name for name in names if name not in ("site-packages", "dist-packages", "test", "__pycache__")]
            files += [Path(folder, name) for name in file_names if name.endswith(".py")]
        return sorted(files, key=lambda file: file.relative_to(root).as_posix())

    def split_files(self) -> list[Path]:
        """The nonempty UTF-8 files of the configured split. Raises UserError if a file cannot be read."""
        held_out = self._split == "validation"
        usable = [file for file in self.files() if isinstance(file, Path) and _is_usable(file)]
        return [file for n, file in enumerate(usable) if (n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]

    def indexed_files(self, into: Path) -> list[Path]:  # noqa: ARG002
        return self.split_files()

    def settings(self) -> dict[str, Any]:
        return {"split": self._split}

    def check_keys(self, key: str) -> list[Problem]:
        rules = Rules(key, self.config)
        is_known = self._split in ("train", "validation")
        rules.require("split", is_known, '"train" or "validation"', "write one of these, or leave it out")
        return rules.problems

    def check_files(self, key: str) -> list[Problem]:
        rules, remedy = Rules(key, self.config), "use a text, jsonl or parquet source instead"
        rules.require("kind", self.files(), f"requires *.py files in {sysconfig.get_paths()['stdlib']}", remedy)
        return rules.problems

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        return []


def _is_usable(file: Path) -> bool:
    try:
        utf8_text(read_range(file, 0, file.stat().st_size))
    except BadRowError:
        return False
    except OSError as error:
        remedy = "make it readable, or use a text, jsonl or parquet source"
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    return True
