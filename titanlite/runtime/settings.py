"""What is declared with a key: its range, what it affects, what it needs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

Affects = Literal["nothing", "layout", "search", "reports", "numbers", "facts"]
"""What depends on the value of a key.

nothing: no number. layout: where and how numbers are computed, not what they are, up to rounding. search: the same, and
a search of layouts may choose it. reports: numbers that are reported, not what is learned. numbers: what is learned; a
change at a resume is logged. facts: what is learned; the start of a run compares it, and accepts or refuses a change.
"""


@dataclass(frozen=True)
class Range:
    """The range of a numeric key. unset: an additional valid value that stands for an automatic choice."""

    remedy: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    unset: float | str | None = None

    def has(self, value: float) -> bool:
        return value == self.unset or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        finite = "a finite number" if self.below == math.inf else ""
        if finite and self.least is not None:
            text = f"{finite}, {_number(self.least)} or more"
        elif finite:
            text = f"{finite} above {_number(self.above)}" if self.above is not None else finite
        elif self.least is not None and self.most is not None:
            text = f"from {_number(self.least)} to {_number(self.most)}"
        elif self.least == 0 and self.below is None:
            text = "0 or more"
        else:
            bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
            text = " and ".join(f"{word} {_number(bound)}" for word, bound in bounds.items() if bound is not None)
        return text if self.unset is None else f"{_number(self.unset)} or {text}"


@dataclass(frozen=True)
class Needs:
    """What a key needs to have an effect: a condition in words, as after "only with", and whether it is met."""

    condition: str
    is_met: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """What is true of a key beside its type; the parameters of `setting`.

    affects: None: as the section, whose class attribute AFFECTS says it. needs: what it needs of its section to have an
    effect. per_node: may differ between the ranks: a name, or a path that may mean the same on each node. is_path: a
    path, whose ~ is the home folder, or a name in its place. once: an option of one start, which is not stored.
    automatic: in words, what the value for an automatic choice becomes.
    """

    range: Range | None = None
    affects: Affects | None = None
    needs: Needs | None = None
    per_node: bool = False
    is_path: bool = False
    once: bool = False
    automatic: str = ""


def setting(
    default: Any = MISSING,
    remedy: str = "leave it out for the default",
    *,
    affects: Affects | None = None,
    needs: Needs | None = None,
    per_node: bool = False,
    is_path: bool = False,
    once: bool = False,
    automatic: str = "",
    **bounds: Any,
) -> Any:
    """Define a field of a section. remedy, bounds: of its Range, if it has one. Others: see Setting. A default of {} is
    a new one for each instance."""
    limits = Range(remedy, **bounds) if bounds else None
    value = Setting(limits, affects, needs, per_node, is_path, once, automatic)
    if default == {}:
        return field(default_factory=dict, metadata={"setting": value})
    return field(default=default, metadata={"setting": value})


@cache
def settings_of(section_type: Any) -> Mapping[str, Setting]:
    """Field -> its Setting, with what it affects, of the dataclass of a section or table."""
    of_section = getattr(section_type, "AFFECTS", "numbers")
    found = {each.name: each.metadata.get("setting", Setting()) for each in fields(section_type)}
    return {name: replace(each, affects=each.affects or of_section) for name, each in found.items()}


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
