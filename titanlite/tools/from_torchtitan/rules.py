"""What a rule of the table consists of: keys of torchtitan, keys of titanlite, and the values between them."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The settings of a torchtitan run. values: by full key, those of the file and torchtitan's defaults. given: the
    keys of the file."""

    values: Mapping[str, Any]
    given: Set[str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


@dataclass(frozen=True)
class Translation:
    """The meaning of some settings. values: by full key of titanlite; a tuple of tables for an array of tables.

    remark: about these values. lost: what is not translated, and what to do. fill_in: what the user must write.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    lost: str = ""
    fill_in: str = ""


@dataclass(frozen=True)
class Rule:
    """The meaning of one or several keys.

    keys: torchtitan's, with the defaults of 0.2.2; none: what torchtitan always does. targets: titanlite's; none:
    without counterpart. note: the difference in meaning; without a counterpart, the reason and what to do.
    convert: None: the value is the same. fills: if the file lacks the keys and the defaults differ, torchtitan's is
    written. switch: a key of torchtitan; where it is off and the file lacks the keys, nothing is written.
    """

    keys: Mapping[str, Any]
    targets: tuple[str, ...]
    note: str = ""
    convert: Callable[[Settings], Translation] | None = None
    fills: bool = True
    switch: str = ""

    def translate(self, settings: Settings) -> Translation:
        """The values of `targets`."""
        if self.convert is not None:
            return self.convert(settings)
        (key,), (target,) = self.keys, self.targets
        return Translation({target: settings[key]})


def same(key: str, default: Any, note: str = "", **options: Any) -> Rule:
    """A key with the same name, in a section of the same name."""
    return Rule({key: default}, (key,), note, **options)


def renamed(key: str, default: Any, target: str, note: str = "", **options: Any) -> Rule:
    """A key with the same values."""
    return Rule({key: default}, (target,), note, **options)


def absent(keys: Mapping[str, Any], note: str) -> Rule:
    """Keys without counterpart."""
    return Rule(keys, (), note)
