"""Reading the fields of a config.json of Hugging Face's transformers: what is missing or not computed is refused."""

from collections.abc import Mapping
from typing import Any

from titanlite.runtime.errors import UserError


def given(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The value of a field, as `kind`; `default` where it is absent. Raises UserError where that is None too."""
    value = fields.get(name)
    value = default if value is None else value
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


def rope_fields(fields: Mapping[str, Any], scaled: str) -> tuple[float, Mapping[str, Any]]:
    """(theta, the scaling's fields; {} for none), from rope_parameters of transformers 5, or as it was before.

    scaled: the one type of scaling that is computed. Raises UserError for any other.
    """
    old = dict(fields.get("rope_scaling") or {})
    found = dict(fields.get("rope_parameters") or {}) or old | {"rope_theta": fields.get("rope_theta")}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", scaled):
        raise UserError(f"config.json: rotary embeddings of type {kind!r}: this family has 'default' and {scaled!r}")
    return given(found, "rope_theta", float), found if kind == scaled else {}
