"""What a model family must supply, and how the [model] section chooses one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from titanlite.models.init import Init
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class ModelConfig:
    """The [model] section: a family, one of its flavors, and hyper-parameters that override the flavor's."""

    family: str = "llama3"
    """Model family."""
    flavor: str = "debug"
    """Named set of hyper-parameters of the family."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters given beside the flavor, by name, e.g. {"vocab_size": 4096}; they stand in [model] itself."""


class DecoderConfig(Protocol):
    """What is read of a family's hyper-parameters: it documents them itself, and may have more."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


TensorStyle = Literal["vocabulary", "norm", "head_norm", "gather", "column", "row", "logits"]


@dataclass(frozen=True)
class Plan:
    """How parallelism reaches a model from outside: names of submodules, nothing else.

    units: groups of submodules in the order of the forward pass, which together own all parameters. Data parallelism
    gathers, frees and reduces the parameters of a unit together; a pipeline is cut between units.
    blocks: the transformer blocks among them, and the index of each in the whole model: what is recomputed and
        compiled one by one.
    tensor_styles: what tensor parallelism does with a submodule, by its name, in which "*" stands for any one part.
        All of them keep the residual stream (batch, seq_len, dim) cut along seq_len outside of "gather" modules.
        "vocabulary": an embedding, cut by rows; its output is cut along seq_len.
        "norm": whole on every rank, each of which normalises its own positions.
        "head_norm": whole on every rank, each of which normalises its own heads: of (batch, seq_len, heads, head_dim)
        as the "column" layer before it left them.
        "gather": a module with parallel layers inside; its first input is gathered along seq_len before it.
        "column": a linear layer cut by output features, "row": by input features, its output summed and cut along
        seq_len.
        "logits": the last linear layer, cut by output features (the vocabulary); its input is gathered.
    may_skip_parameters: whether a microbatch may leave a parameter without gradient on some rank.
    """

    units: tuple[tuple[str, ...], ...]
    blocks: Mapping[str, int]
    tensor_styles: Mapping[str, TensorStyle]
    may_skip_parameters: bool = False


class LanguageModel(nn.Module, ABC):
    """A decoder in plain torch: int64 tokens in, logits out; it knows nothing of parallelism.

    Of its units, those of other pipeline stages may be missing: None as an attribute, no key in a ModuleDict. It then
    passes on what it got.

    draws: whether its forward also takes `row_keys`, int64 (batch,), and draws its random numbers from them by
    models/randomness.py: what is drawn is then the same on every mesh. Without them it draws nothing.
    """

    draws: ClassVar[bool] = False

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """tokens: int64 (batch, seq_len). Returns logits (batch, seq_len, vocab_size).

        Without its first unit, `tokens` is the output of the unit before (batch, seq_len, dim), and without its last
        unit it returns the same of its own; seq_len is then what tensor parallelism leaves of it.

        positions: int64 (batch, seq_len); None: 0, 1, 2, ... in each row. document_ids: int64 (batch, seq_len),
        attention stays among equal ones; None: each row is one document.
        """

    @abstractmethod
    def tie_weights(self) -> None:
        """Let tied parameters be one again, where there are any: whatever replaces parameters breaks the tie."""

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Compute all non-persistent buffers on `device`."""


@dataclass(frozen=True)
class HuggingFace:
    """How models of a family look in the format of Hugging Face's `transformers`.

    Weights are the same there, number by number: (out, in), rotary pairs half a head apart. Their names differ.

    model_type, architecture: what config.json calls the family, and the class that computes it.
    names(config): the name there of each parameter of the whole model; a tied one stands once, under its first name.
    config_json(config): what config.json says of the hyper-parameters.
    config_from_json(fields): the hyper-parameters that config.json means. Raises UserError with the field's name where
    it lacks one, or asks for something that the family does not compute.
    """

    model_type: str
    architecture: str
    names: Callable[[Any], dict[str, str]]
    config_json: Callable[[Any], dict[str, Any]]
    config_from_json: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Family:
    """A model family. The hyper-parameters' type is the family's own frozen dataclass (`config_type`).

    Each field has a string below it that says what it is, for --help and docs/config.md. Of the hyper-parameters others
    read dim, the width of what blocks pass on, head_dim and vocab_size; `build`'s result has its parts by the plan's
    names.

    check(config, seq_len, tp, pp): problems of the hyper-parameters, keys under "model.", for these degrees.
    build(config): the model; parameters on the default device (meta, in training), not initialised.
    plan(config): the Plan.
    init(config, name): the distribution of the parameter of that name.
    flops_per_token(config, seq_len): floating-point operations per trained token, forward and backward.
    hugging_face: its models in the format of `transformers`.
    """

    name: str
    config_type: type
    flavors: Mapping[str, Any]
    check: Callable[[Any, int, int, int], list[Problem]]
    build: Callable[[Any], LanguageModel]
    plan: Callable[[Any], Plan]
    init: Callable[[Any, str], Init]
    flops_per_token: Callable[[Any, int], int]
    hugging_face: HuggingFace
