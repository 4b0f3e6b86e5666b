"""The interface of a model family, and the [model] section."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask, attention_mask
from titanlite.models.parts import Init as Init
from titanlite.models.parts import Role
from titanlite.models.watch import watch
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.settings import Affects, Needs


@dataclass(frozen=True)
class ModelConfig:
    """The [model] section: a family, one of its flavors, and hyper-parameters that override the flavor's."""

    AFFECTS: ClassVar[Affects] = "facts"

    family: str = "llama3"
    """Model family."""
    flavor: str = "debug"
    """Named set of hyper-parameters of the family."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters that override the flavor's, by name, e.g. {"vocab_size": 4096}; written in [model] itself."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the flavor as the run began with it, where the flavor has other values by now; `overrides`
    come before them. No key for users: see titanlite/config/begun.py."""


class DecoderConfig:
    """Hyper-parameters that the shared decoder code reads; a family's dataclass documents them and may have more."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_seq_len: int
    tie_embeddings: bool
    base_dim: int = 0
    base_layers: int = 0
    init_std: float = 0.02
    init_by_depth: bool = True
    n_experts: int = 1
    n_active_experts: int = 1
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    logit_cap: float = 0.0
    score_cap: float = 0.0
    n_dense_layers: int = 0
    dense_ffn_dim: int = 0
    n_shared_experts: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    n_groups: int = 1
    n_active_groups: int = 1
    route_scale: float = 1.0
    n_further_tokens: int = 0
    scoring: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    """What makes the affinities of positions and experts from the router's scores."""
    always_biased: ClassVar[bool] = False
    """Whether mixtures have the biases of bias_rate even if that is 0."""
    gates_shared: ClassVar[bool] = False
    """Whether shared experts have the sigmoid of a score as weight."""
    clamped: ClassVar[bool] = False
    """Whether the activation of experts is clamped_swiglu, not swiglu."""
    expert_biases: ClassVar[bool] = False
    """Whether the layers of experts have biases."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the weights of all norms."""
    norms: ClassVar[Literal["before", "after", "both"]] = "before"
    """Where the norms of a block are: before attention and feed-forward, after them, before the residual sum, or
    both."""

    @property
    def transfers(self) -> bool:
        """Whether parameters follow those of a base model, see titanlite/models/transfer.py."""
        return self.base_dim > 0 or self.base_layers > 0

    @property
    def n_blocks(self) -> int:
        """Transformer blocks, with those that predict further tokens."""
        return self.n_layers + self.n_further_tokens

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that is rotated."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of each head."""
        return self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Weights of the matrices of the attention of a layer."""
        return 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_dim

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings, rounded to their dtype."""
        return 1.0

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of the attention of each layer, in positions; 0: none."""
        return (0,) * self.n_blocks

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """Whether each layer has gated linear attention."""
        return (False,) * self.n_blocks

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices of the attention of such a layer."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_value_heads * self.linear_value_dim
        return self.dim * (2 * keys + 3 * values + 2 * self.linear_value_heads)


@dataclass(frozen=True)
class Structure:
    """Names of the submodules to which parallelism is applied.

    units: FSDP units, in the order of the forward pass: groups of submodules that together own all parameters. Data
        parallelism gathers, frees and reduces the parameters of a unit together; a pipeline is cut between units.
    blocks: the transformer blocks and their indexes in the full model. Each is recomputed and compiled separately.
    shared: other names of parameters that units share, by the first name, in the order of the model's modules. Without
        a pipeline, these units are one FSDP unit; in a pipeline, each stage with one of them has the parameter, and
        their gradients are added up.
    roles: of the parameters, by their names in the full model; filled in by `structure_of` in models/registry.py.
    last: number of the last units that are always on one pipeline stage.
    """

    units: tuple[tuple[str, ...], ...]
    blocks: Mapping[str, int]
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: int = 1
    roles: Mapping[str, Role] = field(default_factory=dict)

    def init(self, name: str) -> Init:
        """The distribution of a parameter."""
        found = self.roles[name].init
        assert found is not None
        return found

    @property
    def cuts(self) -> tuple[str, ...]:
        """The first module of each unit that a pipeline stage can begin with, besides the first stage."""
        return tuple(unit[0] for unit in self.units[1 : len(self.units) - self.last + 1])


class LanguageModel(nn.Module, ABC):
    """A decoder in plain torch: int64 tokens in, logits out; independent of parallelism.

    Units of other pipeline stages may be missing: None as an attribute, no key in a ModuleDict. The forward pass skips
    them.

    draws: whether forward also takes `row_keys`, int64 (batch,), and draws its random numbers from them with
    models/randomness.py, so that they are the same on every mesh. Without `row_keys` it draws no random numbers.
    attention_mask: builds the mask of a forward pass, by default that of models/attention.py, and context parallelism
    may replace that by one for the queries of this rank. A family may have its own, as a method or an attribute: with
    it, context_parallel = "gather" is refused, and generation reads all tokens again for each new one.
    predicts_further: whether forward also takes `next_tokens` and `further_labels`, see Decoder.
    first_names: the name in the full model of a parameter of this pipeline stage that an earlier stage has under this
    name. holders: ranks of the pp axis that have a copy of a parameter that stages share, by its name in the full
    model, in the order of their stages.
    """

    draws: ClassVar[bool] = False
    predicts_further: bool = False
    watch = staticmethod(watch)

    attention_mask: Callable[..., AttentionMask | None]

    def __init__(self) -> None:
        super().__init__()
        self.first_names: Mapping[str, str] = {}
        self.holders: Mapping[str, tuple[int, ...]] = {}
        if not hasattr(type(self), "attention_mask"):  # else a method of the family
            self.attention_mask = attention_mask

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, seq_len, vocab_size) of the token that follows each of `tokens`, int64 (batch, seq_len).

        With labels, int64 (batch, seq_len), the share of each row in the mean loss instead: (batch,), in
        promote_types(dtype, float32). This is the sum of the output layer's loss, normally the cross-entropy in nats,
        over the positions whose label is not negative, divided by num_valid, int64 (batch,): in training, the valid
        labels of the global batch, the same number for each row. A row without a valid label has a share of 0 with a
        graph, so that backward runs. All shares must get the same gradient, since the division is the only weight of a
        row.

        Without the first unit, `tokens` is the previous stage's output, (batch, seq_len / tp, dim). Without the last
        unit, the result has this shape, too. A family with a `boundary` has this width in place of dim.

        positions: int64 (batch, seq_len); None: 0, 1, 2, ... in each row. document_ids: int64 (batch, seq_len); a
        position attends to positions of the same id, up to itself; None: each row is one document.
        """

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names in the full model."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self.first_names.get(name, name), parameter

    @abstractmethod
    def tie_weights(self) -> None:
        """Tie shared parameters again, if the model has any; needed after any call that replaces parameters. A pipeline
        stage may lack a unit that has one of them.

        Take a parameter from `parameters()`: an attribute may be its cast to the compute dtype.
        """

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Compute all non-persistent buffers on `device`."""


def has_own(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    """Whether a method of `kind` is replaced in `module`: by its class or by assignment."""
    return name in vars(module) or getattr(type(module), name) is not getattr(kind, name)


def parameters_of(model_parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of a rank's parts of the model, by name. Parts with the same one appear once."""
    return {name: parameter for part in model_parts for name, parameter in part.named_parameters()}


def copies_in(model_parts: Iterable[nn.Module], pp_rank: int) -> set[str]:
    """Names of parameters of rank `pp_rank` of the pp axis that count on another rank, which has the same ones."""
    holders = (getattr(part, "holders", {}) for part in model_parts)
    return {name for each in holders for name, ranks in each.items() if ranks[0] != pp_rank}


CHOICE_BIAS = "feed_forward.bias"
"""End of the name of the biases that experts are chosen by, a buffer."""


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a saved tensor of a model in `dtype`: biases that experts are chosen by are always in float32."""
    return torch.float32 if name.endswith(CHOICE_BIAS) else dtype


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of checkpoints by name: parameters and persistent buffers, without their autograd graph."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@dataclass(frozen=True)
class StoredCopies:
    """Where transformers stores a parameter that several modules share: as the tensor `name`, and folders may also have
    equal `copies` of it, which are written."""

    name: str
    copies: tuple[str, ...]


@dataclass(frozen=True)
class StoredPart:
    """Where transformers stores a parameter of experts: the rows start, start + step, … of each expert's matrix or
    vector in the tensor `name`. It stores matrices as (experts, in, out), so rows are columns there."""

    name: str
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class StoredGroups:
    """Where transformers stores a parameter together with others: the rows from `start` on of each of `groups` equal
    parts of the tensor `name`, of `rows` rows each."""

    name: str
    groups: int
    rows: int
    start: int
    stop: int


StoredName = str | tuple[str, ...] | StoredCopies | StoredPart | StoredGroups


@dataclass(frozen=True)
class HuggingFace:
    """A family in the format of Hugging Face's `transformers`.

    Weights are identical in both formats: (out, in), rotary pairs half a head apart. Only their names differ, and
    parameters that are stacked here are stored one by one there, or as a StoredPart, and several parameters as one
    tensor there (StoredGroups).

    model_type, architecture: the family's model_type and model class in config.json.
    names(config): maps each parameter of the full model to its name in transformers, to those of its parts along the
    first dimension, in order, to StoredCopies, a StoredPart, or StoredGroups; a tied parameter appears once, under its
    first name.
    config_json(config): the fields of config.json for the hyper-parameters.
    config_from_json(fields): the hyper-parameters in config.json. Raises UserError with the field's name if a field is
    missing, or has a value that the family does not support.
    quantization: the quant_method of folders that store each StoredPart, or with "fp8" any matrix, in fewer bits; "":
    none.
    """

    model_type: str
    architecture: str
    names: Callable[[Any], dict[str, StoredName]]
    config_json: Callable[[Any], dict[str, Any]]
    config_from_json: Callable[[Mapping[str, Any]], Any]
    quantization: Literal["", "mxfp4", "fp8"] = ""


@dataclass(frozen=True)
class Family:
    """A model family, with its hyper-parameters as a frozen dataclass (`config_type`).

    The string below each field of `config_type` describes it, for --help and docs/config.md. Code outside of the family
    reads only dim (width of the residual stream), head_dim, vocab_size and max_seq_len.

    check(config, seq_len, tp, pp): problems of the hyper-parameters, with keys under "model.", for these degrees.
    build(config): the model, with the structure's names; parameters are uninitialized, on the default device (meta, in
    training).
    structure(config): the Structure.
    flops_per_token(config, seq_len): floating-point operations per trained token, forward and backward.
    hugging_face: the family in the format of `transformers`; None: models cannot be exported and imported.
    needs: hyper-parameters that have no effect under other ones; see Needs.
    boundary(config): numbers per position that a pipeline stage passes to the next one; None: dim, the residual stream
    alone. A model whose blocks also pass other tensors concatenates all into one.
    logit_z_loss: what loss.z_loss is by default: that of the training of the published models.
    """

    name: str
    config_type: type
    flavors: Mapping[str, Any]
    check: Callable[[Any, int, int, int], list[Problem]]
    build: Callable[[Any], LanguageModel]
    structure: Callable[[Any], Structure]
    flops_per_token: Callable[[Any, int], int]
    hugging_face: HuggingFace | None = None
    needs: Mapping[str, Needs] = field(default_factory=dict)
    boundary: Callable[[Any], int] | None = None
    logit_z_loss: float = 0.0

    def variant(self, name: str, build: Callable[[Any], LanguageModel], **changes: Any) -> "Family":
        """A family with its own `build` and changes of other fields. It has no format for transformers and no
        logit_z_loss, unless the changes have them: the model may compute something else."""
        return replace(self, **{"name": name, "build": build, "hugging_face": None, "logit_z_loss": 0.0, **changes})

    def stage_width(self, config: Any) -> int:
        """Numbers per position that a pipeline stage passes to the next one."""
        return int(config.dim if self.boundary is None else self.boundary(config))

    @property
    def exported(self) -> HuggingFace:
        """hugging_face. Raises UserError if it is None."""
        if self.hugging_face is None:
            raise UserError(
                f"the family {self.name!r} has no format for transformers: its Family does not set hugging_face"
            )
        return self.hugging_face


FAMILIES: dict[str, Family] = {}
"""The model families by name: those of titanlite/models/registry.py, and those that plugins register."""


def resolve_model(section: ModelConfig) -> tuple[Family, Any]:
    """The family of `section`, and its hyper-parameters: those of the flavor with the kept ones and the overrides.

    Raises KeyError if the family or flavor is unknown, TypeError if an override is.
    """
    family = FAMILIES[section.family]
    flavor = family.flavors[section.flavor]
    changes = {**section.kept, **section.overrides}
    return family, replace(flavor, **changes) if changes else flavor
