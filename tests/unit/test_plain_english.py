"""Test that phrases which readers stumbled over do not return to code, tests, scripts and documents."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BANNED = {
    r"go(es|ing|ne)? on\b|went on\b": "continue, resume, happen",
    r"where there (is|are) (none|no)\b|where there is one\b": "if absent",
    r"\b(is|are|was|were) (?-i:none)\b": "does not exist, is not a ...",
    r"\bwhole\b": "entire, valid, complete, integer",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"once and for all|for ever\b|all the same\b|lets be\b|as it stands|as good as": "name the condition",
    r"\breckon|\bdearest\b|parted by|smell of|read it so\b": "plain words",
    r"\bhence\b|\bwhereby\b|\btherein\b|\bthereof\b": "plain words",
    r"what is to be said|it is said\b|not there any more|that is none\b": "name the thing",
    r"says so\b|\bnobody\b|\bsomebody\b": "name the person or the thing",
    r"\bwithheld\b|step asked for|set aside\b": "skipped, requested, quarantined",
    r"\b(ranks?|process|processes) (hears?|speaks?|says?|knows?|asks?|tells?)\b": "no persons",
    r"\braises \w+ where\b|\bnone where\b": "if",
    r"\bstray\b": "unexpected",
    r"\btorn\b": "truncated, corrupted",
    r"ends? a run\b|ends? the run\b": "stop the run, the run stops",
    r"canonical stream": "stream",
}
"""Pattern, in lower case -> what to write instead."""

FOLDERS = ("titanlite", "tests", "scripts", "benchmarks", "docs")
SUFFIXES = {".py", ".md", ".toml", ".sh", ".sbatch"}


@cache
def texts() -> dict[Path, str]:
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES]
    paths = [path for path in [*found, *ROOT.glob("*.md"), *ROOT.glob("*.sh")] if path != Path(__file__)]
    return {path: path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("pattern", BANNED)
def test_a_phrase_does_not_return(pattern: str) -> None:
    # A phrase may be broken over two lines, in a comment or in a docstring.
    expression = re.compile(pattern.replace(" ", r"[\s#\"]+"), re.IGNORECASE)
    found = []
    for path, text in texts().items():
        for match in expression.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(match[0].split())}")
    assert found == [], f"write instead: {BANNED[pattern]}"
