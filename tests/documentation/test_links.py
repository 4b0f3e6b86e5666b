"""Pages have no links of the kinds that the site's generator does not check: in HTML, and by reference."""

import re

import pytest

from tests.documentation.blocks import PAGES, REPOSITORY

CODE = re.compile(r"^ *(`{3,}).*?^ *\1|`[^`]*`", re.MULTILINE | re.DOTALL)
UNCHECKED = re.compile(r"<a\b|\]\[")


def unchecked_links(text: str) -> list[str]:
    return UNCHECKED.findall(CODE.sub("", text))


def test_mistakes_are_found() -> None:
    assert unchecked_links('`a[0][1]` <a href="none.md">, [a][none]\n```\na[0][1]\n```\n[b](b.md)') == ["<a", "]["]


@pytest.mark.parametrize("page", PAGES)
def test_all_links_are_checked(page: str) -> None:
    assert unchecked_links((REPOSITORY / page).read_text(encoding="utf-8")) == []
