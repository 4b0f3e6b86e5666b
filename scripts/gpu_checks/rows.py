"""The rows of the report: what was checked, and how it ended."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = float | int | str | None
Status = Literal["passed", "failed", "skipped", "measured"]


class SkippedError(Exception):
    """A case cannot run here. The text is the reason."""


class WrongError(Exception):
    """A case has found something wrong. The text says what, and the bound."""


@dataclass(frozen=True)
class Found:
    """The result of a case that has not failed. measured: the case has no bound, so it cannot fail."""

    text: str
    values: Mapping[str, Value] = field(default_factory=dict)
    measured: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the report. check: the section. text: for people; values: the same for programs, in JSON types."""

    check: str
    name: str
    status: Status
    text: str
    values: Mapping[str, Value] = field(default_factory=dict)


Emit = Callable[[Row], None]
"""Passes a row on as soon as it is known."""


def run_case(check: str, name: str, case: Callable[[], Found]) -> Row:
    """Run a case. An error becomes a failed row, so that the other cases still run."""
    try:
        found = case()
    except SkippedError as reason:
        return Row(check, name, "skipped", str(reason))
    except WrongError as error:
        return Row(check, name, "failed", str(error))
    except Exception as error:
        return Row(check, name, "failed", describe(error), {"traceback": traceback.format_exc()})
    return Row(check, name, "measured" if found.measured else "passed", found.text, found.values)


def describe(error: BaseException) -> str:
    """The type and the first lines of the message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{' ...' if len(text) > 300 else ''}"


def require_errors(errors: dict[str, float], bounds: dict[str, float]) -> Found:
    """Compare relative errors with their bounds, by name. Raises WrongError with all that exceed theirs, or are NaN."""
    assert errors, "nothing was compared"
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    if wrong:
        raise WrongError(
            ", ".join(f"{name} off by {error:.1e} (bound {bounds[name]:.0e})" for name, error in wrong.items())
        )
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    text = f"off by at most {errors[worst]:.1e} ({worst}; bound {bounds[worst]:.0e})"
    return Found(text, {f"error of {name}": error for name, error in errors.items()})
