"""docs/security.md names tests and hostile inputs that exist."""

import re
from pathlib import Path

from tests.security.hostile import HOSTILE

TESTS = Path(__file__).parents[1]
PAGE = " ".join((TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8").split())


def test_the_tests_that_the_page_names_exist() -> None:
    paths = re.findall(r"`((?:unit|distributed|security)/[^`]*)`", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (TESTS / path).exists()] == []


def test_the_hostile_inputs_that_the_page_names_exist() -> None:
    lists = re.findall(r"`security/`: ((?:\"[^\"]*\"(?:, )?)+)", PAGE)
    names = [name for each in lists for name in re.findall(r"\"([^\"]*)\"", each)]
    assert len(names) > 10
    patterns = [re.compile(re.escape(name).replace("…", ".*")) for name in names]
    assert [each.pattern for each in patterns if not any(map(each.fullmatch, HOSTILE))] == []
