"""Reading the fields of a config.json of Hugging Face's transformers: what is missing or not computed is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.runtime.errors import Problem, UserError

_TOO_LARGE = 2**40
"""No number of a model is so large, and whoever computes with one that is may not end."""


def given(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The value of a field, as `kind`; `default` where it is absent.

    Raises UserError where that is None too, where it is of another kind, and where a number is too large for a model's.
    """
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise UserError(f"config.json: {name} is too large a number")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        what = "is missing" if value is None else f"is {value!r}, not of type {kind.__name__}"
        raise UserError(f"config.json: {name} {what}")
    return value


def refuse_other(fields: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Raises UserError where a field is there with another value than the one that is computed here."""
    for name, value in computed.items():
        if fields.get(name, value) not in (value, None):
            raise UserError(f"config.json: {name} = {fields[name]!r}: this family has {value!r} only")


def refuse_invalid(problems: Sequence[Problem], names: Mapping[str, str]) -> None:
    """Raises UserError for the first of the problems that a family's check finds in hyper-parameters from config.json.

    names: of the fields, by the names of the hyper-parameters here.
    """
    if problems:
        first = problems[0]
        name = first.key.removeprefix("model.")
        raise UserError(f"config.json: {names.get(name, name)} = {first.value!r}: {first.rule} (here: {first.key})")


def rope_fields(fields: Mapping[str, Any], scaled: str | None) -> tuple[float, Mapping[str, Any]]:
    """(theta, the scaling's fields; {} for none), from rope_parameters of transformers 5, or as it was before.

    scaled: the one type of scaling that is computed, if any. Raises UserError for any other.
    """
    # Where both are there, transformers takes rope_scaling.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    outside = {field: fields.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    found = outside | given(fields, name, dict, {})
    refuse_other(found, {"partial_rotary_factor": 1.0})
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ("default", scaled):
        types = " and ".join(repr(one) for one in ("default", scaled) if one)
        raise UserError(f"config.json: {name}.rope_type = {kind!r}: this family computes {types} only")
    if found.get("rope_theta") is None:
        raise UserError(
            "config.json: rope_theta is missing: write the one that the model was trained with; transformers takes "
            "10000.0 then, which is that of Llama 1 and 2"
        )
    return given(found, "rope_theta", float), found if kind == scaled else {}
