"""Decoders in the format of Hugging Face's transformers: names of parameters, and the fields of config.json.

A missing field, or a value that no decoder here supports, raises UserError.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, get_type_hints

import torch
from torch import Tensor

from titanlite.models.family import HuggingFace, StoredCopies, StoredGroups, StoredName, StoredPart
from titanlite.runtime.errors import Problem, UserError

MODULE_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
PRE_NORM_NAMES = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORM_NAMES = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
ALL_NORM_NAMES = {**PRE_NORM_NAMES, **POST_NORM_NAMES, "ffn_norm": "pre_feedforward_layernorm"}
HEAD_NORM_NAMES = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "n_experts": "num_experts",
    "n_active_experts": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
"""The field of config.json of each hyper-parameter, of those that a family has."""
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
"""Fields with a single supported value, which is also their default. None: the field must be absent."""

NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""For families of which transformers would add special tokens of its own: it does not train a pad_token_id."""

OWN_BALANCE_LOSS = "titanlite_balance_loss"
"""Field of an export: the balance_loss of the run. In other folders, router_aux_loss_coef belongs to another loss."""
_READ_ELSEWHERE = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types", "quantization_config"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *(
        "num_nextn_predict_layers",
        "num_local_experts",
        "output_router_logits",
        "attn_logit_softcapping",
        "use_sliding_window",
        "wrapper",
    ),
)
_NOT_OF_THE_MODEL = (
    *("model_type", "architectures", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "cache_implementation"),
    # other names of fields, or details of them
    *("max_window_layers", "_sliding_window_pattern", "sliding_window_size", "experts_per_token"),
    *("initial_context_length", "mamba_ssm_dtype"),
    # of the balance loss and of layouts of other code
    *("ep_size", "seq_aux", OWN_BALANCE_LOSS),
)
_KINDS_OF_WINDOWS = ("full_attention", "sliding_attention")
_TOO_LARGE = 2**40
"""Integers from here on are invalid in any model; computing with them might not terminate."""


def read_field(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Value of a field, as `kind`; `default` if the field is absent.

    Raises UserError if the field is absent and has no default, has another type, or is too large an integer.
    """
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise UserError(f"config.json: {name} is a number of 2^40 or more: write the model's value")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        what = "is missing" if value is None else f"is {value!r}, not of type {kind.__name__}"
        raise UserError(f"config.json: {name} {what}: write the model's value, or download the file again")
    return value


def unknown_fields(written: Collection[str], fields: Mapping[str, Any]) -> list[str]:
    """Names of fields of config.json that no family reads, and that may change what the model computes. written: those
    that the family writes, and reads."""
    known = {*written, *_READ_ELSEWHERE, *_NOT_OF_THE_MODEL}
    if "use_sliding_window" in written:  # of layers that the family does not have
        known.add("sliding_window")
    return sorted(
        name
        for name, value in fields.items()
        if value not in (None, []) and name not in known and (name, value) != ("use_mrope", False)
    )


def refuse_other(fields: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise UserError if a field is present with a value other than the supported one."""
    for name, value in supported.items():
        if fields.get(name, value) not in (value, None):
            rule = "does not support it" if value is None else f"supports only {value!r}"
            raise UserError(f"config.json: {name} = {fields[name]!r}: this family {rule}")


def refuse_invalid(problems: Sequence[Problem], names: Mapping[str, str]) -> None:
    """Raise UserError for the first of the problems that a family's check found in hyper-parameters from config.json.

    names: the field of config.json of each hyper-parameter.
    """
    if problems:
        first = problems[0]
        name = first.key.removeprefix("model.")
        raise UserError(f"config.json: {names.get(name, name)} = {first.value!r}: {first.rule} (as {first.key})")


def rope_fields(
    fields: Mapping[str, Any], scaled: str | None = None, *, default: float, partial: bool = False
) -> tuple[float, Mapping[str, Any]]:
    """(theta, fields of the scaling or {}), from rope_parameters (transformers 5) or rope_theta and rope_scaling.

    scaled: the supported type of scaling, if there is one. Raises UserError for any other type. default: theta of
    transformers if the field is missing. partial: whether any partial_rotary_factor is supported.
    """
    # If both are present, transformers takes rope_scaling.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    outside = {field: fields.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    found = outside | read_field(fields, name, dict, {})
    refuse_other(found, {} if partial else {"partial_rotary_factor": 1.0})
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ("default", scaled):
        supported = " and ".join(repr(each) for each in ("default", scaled) if each is not None)
        raise UserError(f"config.json: {name}.rope_type = {kind!r}: this family supports only {supported}")
    if found.get("rope_theta") is None:
        raise UserError(
            f"config.json: rope_theta is missing: add the value that the model was trained with; transformers would "
            f"take {default}"
        )
    for each in _KINDS_OF_WINDOWS:
        if each in found:
            raise UserError(
                f"config.json: {name}.{each}: all layers of this family have the same rotary embeddings: write its "
                f"fields into {name} itself"
            )
    original = "original_max_position_embeddings"
    if kind == scaled and original in found:
        refuse_other(fields, {original: found[original]})  # transformers takes the field outside of the scaling
    return read_field(found, "rope_theta", float), found if kind == scaled else {}


@dataclass(frozen=True)
class Scaling:
    """A scaling of rotary embeddings in config.json.

    kind: its rope_type. fields: the field of each hyper-parameter. optional: hyper-parameters whose field may be
    absent. supported: further fields, with their single supported value. required: those of them that must be present,
    and are written, since their default in transformers is another value. attention_factor(factor): what transformers
    multiplies rotary embeddings by if the field is missing.
    """

    kind: str
    fields: dict[str, str]
    optional: tuple[str, ...] = ()
    supported: dict[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    attention_factor: Callable[[float], float] = lambda factor: 0.1 * math.log(factor) + 1.0

    def read(self, scaling: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields without an attention_factor that is what transformers computes without one. Raises UserError."""
        factor = scaling.get("factor")
        has_factor = "attention_factor" in self.supported and scaling.get("attention_factor") is not None
        if not has_factor or not isinstance(factor, int | float) or not factor > 0:
            return scaling
        found = read_field(scaling, "attention_factor", float)
        usual = self.attention_factor(factor)
        if not math.isclose(found, usual, rel_tol=1e-9):
            raise UserError(
                f"config.json: attention_factor = {found}: this family supports only {usual}, that of factor = {factor}"
            )
        return {name: value for name, value in scaling.items() if name != "attention_factor"}

    def written(self, config: Any) -> dict[str, Any] | None:
        """The fields for the hyper-parameters; None if the factor is 1."""
        if config.rope_scaling_factor == 1.0:
            return None
        fields = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        return {"rope_type": self.kind} | fields | {name: self.supported[name] for name in self.required}


YARN = Scaling(
    "yarn",
    {
        "rope_scaling_factor": "factor",
        "rope_beta_fast": "beta_fast",
        "rope_beta_slow": "beta_slow",
        "rope_original_seq_len": "original_max_position_embeddings",
    },
    optional=("rope_beta_fast", "rope_beta_slow"),
    supported={"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True},
)
"""YaRN, without what other models change in it."""


def number_or_none(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """The number of a field; 0 if it is null, `default` if the field is missing, such as transformers' own default."""
    given = name not in fields or fields[name] is not None
    return read_field(fields, name, kind, default) if given else kind(0)


def layer_kinds(interval: int, n_layers: int, other: str = "sliding_attention") -> list[str]:
    """The kind of attention of each layer, in the words of transformers: full in those whose number, from 1, is a
    multiple of the interval, `other` in all others."""
    numbers = range(1, n_layers + 1)
    return [other if interval < 1 or number % interval else "full_attention" for number in numbers]


def window_fields(
    fields: Mapping[str, Any], interval: int, window: int, name: str = "full_attention_interval"
) -> dict[str, Any]:
    """The fields with an interval, in the field `name`, for `layer_types`. interval, window: those of transformers if
    the fields are missing: without `layer_types`, it does not read `name`. Raises UserError."""
    if fields.get("layer_types"):
        interval = read_field(fields, name, int, interval)
    interval = fixed_interval(fields, "layer_types", layer_kinds, interval)
    found = number_or_none(fields, "sliding_window", int, window)
    if fields.get("sliding_window", found) is None and interval != 1:
        raise UserError("config.json: sliding_window is null, but not all layers have full attention: write the window")
    is_unused = interval == 1 and found == fields.get("max_position_embeddings")  # see written_windows
    return {**fields, "layer_types": None, name: interval, "sliding_window": 0 if is_unused else found}


def window_of_all_layers(fields: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The fields without `layer_types`, and with the window that all layers have; 0 for none. window: that of
    transformers if the field is missing. Raises UserError if layers differ in it."""
    found = number_or_none(fields, "sliding_window", int, window)
    given, n_layers = read_field(fields, "layer_types", list, []), read_field(fields, "num_hidden_layers", int)
    kind = given[0] if given else None
    if given and (len(given) != n_layers or given != [kind] * len(given) or kind not in _KINDS_OF_WINDOWS):
        raise UserError(
            f"config.json: layer_types = {given!r}: this family supports only one kind for all {n_layers} layers, "
            f"{' or '.join(_KINDS_OF_WINDOWS)}"
        )
    if kind == "sliding_attention" and not found:
        raise UserError(
            "config.json: layer_types has sliding_attention, but no sliding_window is set: write the window"
        )
    if kind == "full_attention" and found and "wrapper" in fields:
        raise UserError(
            f"config.json: sliding_window = {found}, but layer_types has full_attention only: transformers takes the "
            "window in a model that wraps this one, and none in the text model alone: remove one of both fields"
        )
    return {**fields, "layer_types": None, "sliding_window": 0 if kind == "full_attention" else found}


def without_unused_window(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with `use_sliding_window` only if a layer has the window. For families in which `layer_types` decides,
    and if it is missing, `max_window_layers`, the number of the first layer with a window, from 0."""
    if fields.get("use_sliding_window") is not True:
        return fields
    kinds, n_layers = read_field(fields, "layer_types", list, []), read_field(fields, "num_hidden_layers", int)
    first = read_field(fields, "max_window_layers", int, 28)  # 28: of transformers
    has_window = any(kind != "full_attention" for kind in kinds) if kinds else first < n_layers
    return {**fields, "use_sliding_window": has_window and fields.get("sliding_window", 4096) is not None}


def with_head_dim(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with a `head_dim`, for families of which transformers divides hidden_size if the field is missing."""
    if fields.get("head_dim") is not None:
        return fields
    width, n_heads = (read_field(fields, name, int) for name in ("hidden_size", "num_attention_heads"))
    return {**fields, "head_dim": width // max(n_heads, 1)}


def written_windows(config: Any) -> dict[str, Any]:
    """The fields of windows. Without one, that of all positions: transformers needs a number even for a model that
    does not use it."""
    kinds = layer_kinds(config.full_interval, config.n_layers)
    return {"layer_types": kinds, "sliding_window": config.sliding_window or config.max_seq_len}


def fixed_interval(fields: Mapping[str, Any], name: str, layers: Callable[[int, int], list[Any]], interval: int) -> int:
    """The interval of the layers of another kind, from the field `name`, a list with the kind of each layer; `interval`
    if that is right, or if there is no list. layers(interval, number of layers): the list. Raises UserError."""
    given, n_layers = read_field(fields, name, list, []), read_field(fields, "num_hidden_layers", int)
    other = layers(1, 1)[0]
    first = given.index(other) + 1 if other in given else len(given) + 1
    for found in (interval, first):
        if not given or (len(given) == n_layers and given == layers(found, n_layers)):
            return found
    raise UserError(
        f"config.json: {name} = {given!r}: this family supports only one kind of layers at a fixed interval"
    )


def rope_of_full_layers(fields: Mapping[str, Any], theta: float, local: str | None = None) -> dict[str, Any]:
    """The fields with the rotary embeddings of layers of full attention as those of all layers.

    transformers 5 reads rotary embeddings by kind of layer, from rope_parameters, and those of layers of full attention
    also from rope_scaling. theta: its base if a field is missing. local: the field for the base of layers with a
    window, if it may be another. Raises UserError if those of layers with a window are scaled, or have another base
    that may not, and if versions of transformers differ in what they read.
    """
    scaling, given = (read_field(fields, name, dict, {}) for name in ("rope_scaling", "rope_parameters"))
    by_kind = any(kind in given for kind in _KINDS_OF_WINDOWS)
    if scaling and given and (local is not None or not by_kind):
        raise UserError("config.json: rope_scaling and rope_parameters: this family reads only one of both: remove one")
    _refuse_unread_scaling(scaling)
    outside = _theta(fields)
    if given and not by_kind:
        _refuse_unread_parameters(given, theta if outside is None else outside, "" if local else _IN_ALL_LAYERS)
        outside = _theta({"rope_theta": outside, **given})
    full = {"rope_theta": outside, **read_field(given, "full_attention", dict, {}), **scaling}
    window = read_field(given, "sliding_attention", dict, {})
    base, of_window = _theta(full), _theta(window)
    is_other = local is None and of_window not in (None, base)
    if is_other or any((window.get(key) or "default") != "default" for key in ("rope_type", "type")):
        raise UserError(
            f"config.json: rope_parameters.sliding_attention = {window!r}: this family supports only unscaled rotary "
            f"embeddings{' with the base of full_attention' if local is None else ''}"
        )
    others = [theta if of_window is None else of_window, *([] if outside is None or not scaling else [outside])]
    other = next((each for each in others if each != base), None)
    if local is None and base is not None and other is not None:
        raise UserError(
            f"config.json: rope_theta = {base}: versions of transformers differ in the base of some layers, {base} or "
            f"{other}: write rope_parameters with full_attention and sliding_attention, and the same rope_theta in "
            "both and outside"
        )
    found = {**fields, "rope_scaling": None, "rope_parameters": None, "rope_theta": base}
    if local is not None and of_window is not None:
        found[local] = of_window
    return found | {"rope_parameters" if given and not scaling else "rope_scaling": full}


_IN_ALL_LAYERS = "transformers 5.0 to 5.3 take it in all layers, "


def _theta(fields: Mapping[str, Any]) -> float | None:
    theta: float | None = None if fields.get("rope_theta") is None else read_field(fields, "rope_theta", float)
    return theta


def _refuse_unread_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise UserError for a rope_scaling that transformers 5 does not read in families with kinds of layers."""
    kind = scaling.get("type") or "default"
    if not scaling.get("rope_type") and kind != "default":
        raise UserError(
            f"config.json: rope_scaling.type = {kind!r} without rope_type: transformers 4 scales by it, transformers 5 "
            "does not scale: write the key rope_type in its place, or remove rope_scaling"
        )
    for each in _KINDS_OF_WINDOWS:
        if each in scaling:
            raise UserError(
                f"config.json: rope_scaling.{each}: transformers reads kinds of layers in rope_parameters only: rename "
                "rope_scaling to rope_parameters"
            )


def _refuse_unread_parameters(given: Mapping[str, Any], base: float, others: str) -> None:
    """Raise UserError for rope_parameters of all layers, which transformers does not read in families with kinds of
    layers, unless they are what it takes. base: its rope_theta. others: what other versions do."""
    is_default = (given.get("rope_type") or given.get("type") or "default") == "default"
    if not is_default or given.get("rope_theta", base) != base:
        raise UserError(
            f"config.json: rope_parameters has neither full_attention nor sliding_attention: {others}transformers 5.24 "
            f"ignores it, and takes rope_theta = {base} without scaling: write rope_parameters for both kinds of "
            "layers, each with rope_type and rope_theta"
        )


@dataclass(frozen=True)
class DecoderFormat:
    """The format of a decoder family.

    config_type: its hyper-parameters, a dataclass. check: of the family. fields: those that differ from FIELDS.
    norm_names: of the norms of the residual stream. block_names: those beside them and BLOCK_NAMES. own_names: of
    parameters of a block, with their last part; with any, the experts are among them. biases: modules of a block that
    have one. block(config, index): in place of these four, names of all parameters of a block, if blocks differ.
    further_prefix: of names of the block that predicts further tokens, if that has no copies of embedding and output
    layer; "": it is stored as the other blocks, with copies.
    supported: fields with a single supported value, which are also written, in place of SUPPORTED_VALUES where both
    have them. required: those of them that must be present, since their default in transformers is another value.
    scaling: the supported one, if any. default_theta: transformers' own rope_theta. prepared: the fields of config.json
    with one for each hyper-parameter, raising UserError. written: further fields to write, or other values.
    """

    config_type: type[Any]
    check: Callable[[Any, int, int, int], list[Problem]]
    fields: dict[str, str] = field(default_factory=dict)
    norm_names: dict[str, str] = field(default_factory=lambda: PRE_NORM_NAMES)
    block_names: dict[str, str] = field(default_factory=dict)
    own_names: dict[str, str | StoredPart] = field(default_factory=dict)
    block: Callable[[Any, int], Mapping[str, StoredName]] | None = None
    biases: tuple[str, ...] = ()
    further_prefix: str = ""
    supported: dict[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    scaling: Scaling | None = None
    default_theta: float = 10_000.0
    prepared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: fields
    written: Callable[[Any], dict[str, Any]] = lambda _: {}

    def hugging_face(self, model_type: str, architecture: str) -> HuggingFace:
        return HuggingFace(model_type, architecture, self.names, self.config_json, self.config_from_json)

    def names(self, config: Any) -> dict[str, StoredName]:
        """Names of all parameters in transformers, by their names in titanlite."""
        found: dict[str, StoredName] = {}
        for index in range(config.n_blocks):
            block = self._block(config) if self.block is None else self.block(config, index)
            prefix = (index >= config.n_layers and self.further_prefix) or f"model.layers.{index}."
            found |= {f"layers.{index}.{ours}": prefixed(theirs, prefix) for ours, theirs in block.items()}
        for ours, theirs in MODULE_NAMES.items():
            if ours != "output" or not config.tie_embeddings:
                found[f"{ours}.weight"] = f"{theirs}.weight"
        if config.n_further_tokens and not self.further_prefix:
            prefix, tied = f"model.layers.{config.n_layers}.", config.tie_embeddings
            copies = {"tok_embeddings": "embed_tokens", "output": "shared_head.head"}
            for ours, theirs in copies.items():
                first = MODULE_NAMES["tok_embeddings" if tied else ours]
                own = tuple(copies.values()) if tied else (theirs,)
                name = StoredCopies(f"{first}.weight", tuple(f"{prefix}{each}.weight" for each in own))
                found |= {f"{ours}.weight": name} if ours == "tok_embeddings" or not tied else {}
        return found

    def _block(self, config: Any) -> dict[str, StoredName]:
        names = BLOCK_NAMES
        if config.n_experts > 1:
            names = {ours: theirs for ours, theirs in names.items() if not ours.startswith("feed_forward")}
            names["feed_forward.router"] = "mlp.gate"
        names = names | self.norm_names | self.block_names
        found: dict[str, StoredName] = {
            f"{ours}.{kind}": f"{theirs}.{kind}"
            for ours, theirs in names.items()
            for kind in (("weight", "bias") if ours in self.biases else ("weight",))
        }
        if config.n_experts > 1 and not self.own_names:
            found |= expert_names(config.n_experts)
        return found | self.own_names

    def config_json(self, config: Any) -> dict[str, Any]:
        """Fields of config.json; rope_theta at the top level, which all versions of transformers read. Those of the
        scaling are left out if the factor is 1."""
        fields = {theirs: getattr(config, ours) for ours, theirs in self._fields().items()}
        scaling = None if self.scaling is None else self.scaling.written(config)
        supported = {name: value for name, value in (SUPPORTED_VALUES | self.supported).items() if value is not None}
        return fields | supported | {"rope_scaling": scaling} | self.written(config)

    def config_from_json(self, fields: Mapping[str, Any]) -> Any:
        """Hyper-parameters in config.json. Raises UserError if a field is missing, invalid or not supported."""
        fields = self.prepared(fields)
        refuse_other(fields, SUPPORTED_VALUES | self.supported)
        for name in self.required:
            read_field(fields, name, type(self.supported[name]))
        for kind in read_field(fields, "layer_types", list, []):
            refuse_other({"layer_types": kind}, {"layer_types": "full_attention"})
        partial = "partial_rotary_factor" in self._fields()
        kind = self.scaling.kind if self.scaling else None
        theta, scaling = rope_fields(fields, kind, default=self.default_theta, partial=partial)
        values = {"rope_theta": theta} | self._values(fields)
        names = self._fields()
        if self.scaling is not None:
            scaling = self.scaling.read(scaling)
            refuse_other(scaling, self.scaling.supported)
            for name in self.scaling.required if scaling else ():
                read_field(scaling, name, type(self.scaling.supported[name]))
            unscaled = {"rope_scaling_factor": 1.0}
            values |= self._read(scaling, self.scaling.fields, self.scaling.optional) if scaling else unscaled
            names |= self.scaling.fields
        config = self.config_type(**values)
        refuse_invalid(self.check(config, 1, 1, 1), names)
        if "head_dim" not in values:
            refuse_other(fields, {"head_dim": config.head_dim})
        return config

    def _fields(self) -> dict[str, str]:
        """The field of each hyper-parameter, also of a head_dim that follows from others."""
        own = {"head_dim", *(each.name for each in dataclass_fields(self.config_type))}
        return {ours: theirs for ours, theirs in FIELDS.items() if ours in own} | self.fields

    def _values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters, except those of rotary embeddings."""
        own = {each.name for each in dataclass_fields(self.config_type)} - {"rope_theta"}
        names = {ours: theirs for ours, theirs in self._fields().items() if ours in own}
        if "n_experts" in names:
            if fields.get("output_router_logits"):
                raise UserError(
                    "config.json: output_router_logits = true: transformers then adds a balance loss over all "
                    "positions of a microbatch, which depends on the batch size of a rank: write false. "
                    "model.balance_loss is over rows"
                )
            if "num_local_experts" in fields:  # transformers 5
                names["n_experts"] = "num_local_experts"
        given = {"num_key_value_heads": fields.get("num_attention_heads")}
        given |= {name: value for name, value in fields.items() if value is not None}
        return self._read(given, names, ("head_dim", "tie_embeddings", "balance_loss"))

    def _read(self, fields: Mapping[str, Any], names: Mapping[str, str], optional: tuple[str, ...]) -> dict[str, Any]:
        kinds = get_type_hints(self.config_type)
        return {
            ours: read_field(fields, theirs, kinds[ours], getattr(self.config_type, ours) if ours in optional else None)
            for ours, theirs in names.items()
        }


def expert_names(n_experts: int) -> dict[str, StoredName]:
    """Names of the experts of a block, stored one by one."""
    return {
        f"feed_forward.experts.{ours}": tuple(f"mlp.experts.{expert}.{theirs}.weight" for expert in range(n_experts))
        for ours, theirs in EXPERT_NAMES.items()
    }


def prefixed(name: StoredName, prefix: str) -> StoredName:
    """The name of a parameter of a block, with a prefix."""
    if isinstance(name, str):
        return prefix + name
    return tuple(prefix + each for each in name) if isinstance(name, tuple) else replace(name, name=prefix + name.name)


def stored_names(name: StoredName) -> tuple[str, ...]:
    """The names of the stored tensors of a parameter."""
    if isinstance(name, StoredCopies):
        return (name.name, *name.copies)
    return (name,) if isinstance(name, str) else name if isinstance(name, tuple) else (name.name,)


def stored_tensors(tensors: Mapping[str, Tensor], names: Mapping[str, StoredName]) -> dict[str, Tensor]:
    """The stored tensors of parameters by their names, as views if they are not put together of several. tensors: by
    titanlite's names, with all parts of a stored tensor. names: see HuggingFace."""
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    groups: dict[str, dict[int, Tensor]] = {}
    for ours, tensor in tensors.items():
        name = names[ours]
        if isinstance(name, StoredPart):
            parts.setdefault(name.name, {})[name.start] = tensor
        elif isinstance(name, StoredCopies):
            found |= dict.fromkeys(stored_names(name), tensor)
        elif isinstance(name, StoredGroups):
            groups.setdefault(name.name, {})[name.start] = tensor.unflatten(0, (name.groups, -1))
        else:
            found |= {name: tensor} if isinstance(name, str) else dict(zip(name, tensor.unbind(), strict=True))
    for theirs, by_start in parts.items():
        rows = [by_start[start] for start in range(len(by_start))]
        joined = rows[0] if len(rows) == 1 else torch.stack(rows, dim=2).flatten(1, 2)
        found[theirs] = joined.mT if joined.dim() == 3 else joined
    for theirs, by_start in groups.items():
        found[theirs] = torch.cat([by_start[start] for start in sorted(by_start)], dim=1).flatten(0, 1)
    return found
