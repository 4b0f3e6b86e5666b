"""Names that others chose: which are paths below a folder."""

from pathlib import Path

import pytest

from titanlite.runtime.errors import UserError
from titanlite.storage.address import path_below


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "a\\b", "a\0", "a\nb", "a\x9b", "\udc80"]
)
def test_names_of_others_that_are_no_paths_below_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"is not the name of a file below .*: it is neither read nor written") as error:
        path_below(tmp_path, name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a/b", ".a", "..a", "a..", "...", "a b/c?#*", "é\u200d漢"])
def test_names_of_others_that_are_paths_below_a_folder(tmp_path: Path, name: str) -> None:
    assert path_below(tmp_path, name) == tmp_path / name
