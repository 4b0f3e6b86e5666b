"""Decoder in plain torch, shared by families with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU. The
file of a family adds its specifics."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask
from titanlite.models.experts import mixtures_of
from titanlite.models.family import DecoderConfig, Family, HuggingFace, LanguageModel, Structure
from titanlite.models.head import OutputLayer
from titanlite.models.layers import FeedForward, RMSNorm, RopeScaling, RotaryEmbedding, RotaryTables
from titanlite.models.mixer import Mixer
from titanlite.models.parts import LAST_NORM, NORM, POST_NORM, OwnPositions, Role
from titanlite.models.watch import watch
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs, Range


@dataclass(frozen=True)
class HyperParameters(DecoderConfig):
    """Hyper-parameters of all decoders. Each may be given in [model] and overrides the flavor's value.

    A family adds its own, and may have other defaults.
    """

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads; each is dim / n_heads wide, unless the family has head_dim."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 4096
    """Maximum sequence length, and the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""
    base_dim: int = 0
    """dim of a smaller model of the same shape, whose learning rate, weight decay and initial values this one takes
    over by µP (docs/optimizers.md): the other widths must be larger by the same factor, head_dim the same. 0: none."""
    base_layers: int = 0
    """n_layers of the smaller model. 0: nothing is taken over for the depth."""
    init_std: float = 0.02
    """Standard deviation of the initial values of matrices and embeddings, which are clamped at three of them."""
    init_by_depth: bool = True
    """The standard deviation of wo and w2, which write into the residual stream, is divided by sqrt(2 x n_layers)."""

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """Width of one attention head."""
        return self.dim // self.n_heads


@dataclass(frozen=True)
class ExpertHyperParameters(DecoderConfig):
    """Those of decoders with a mixture of experts in every block."""

    ffn_dim: int
    """Width of the hidden layer of each expert."""
    n_experts: int = 128
    """Experts in each block."""
    n_active_experts: int = 8
    """Experts that process each position: the most probable ones."""
    balance_loss: float = 0.001
    """Coefficient of the balance loss of each block, a mean over the rows of the global batch; 0.0: none.
    May change at a resume."""
    z_loss: float = 0.0
    """Coefficient of the z-loss of each router: the mean square of the logarithm of the sum of its exponentials.
    May change at a resume."""
    bias_rate: float = 0.0
    """Change per step of the biases that balance the choice of experts; 0.0: no biases. 0.001 is usual, with a small
    balance_loss. The published format has no biases: a run with them cannot be exported. May change at a resume, but
    not from or to 0."""


@dataclass(frozen=True)
class WindowHyperParameters(DecoderConfig):
    """Those of decoders with a window in all layers but each full_interval-th one."""

    sliding_window: int = 4096
    """Positions that each one sees, its own included, in most layers."""
    full_interval: int = 2
    """Each layer whose number, from 1, is a multiple of it sees all positions."""

    @property
    def windows(self) -> tuple[int, ...]:
        numbers = range(1, self.n_layers + 1)
        return tuple(self.sliding_window if number % self.full_interval else 0 for number in numbers)


@dataclass(frozen=True)
class HybridHyperParameters(DecoderConfig):
    """Those of decoders with gated linear attention in all layers but each full_interval-th one."""

    full_interval: int = 4
    """Each layer whose number, from 1, is a multiple of it has full attention, the others gated linear attention."""
    partial_rotary_factor: float = 0.25
    """Part of each head of full attention that is rotated."""
    linear_key_heads: int = 16
    """Heads of queries and keys in linear attention, each for linear_value_heads / linear_key_heads heads."""
    linear_value_heads: int = 32
    """Heads of values, with a state each."""
    linear_key_dim: int = 128
    """Width of these heads of queries and keys."""
    linear_value_dim: int = 128
    """Width of these heads of values."""
    linear_taps: int = 4
    """Last positions that the convolutions before linear attention see, the own one included."""

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        linear = tuple(number % self.full_interval != 0 for number in range(1, self.n_layers + 1))
        return linear + (False,) * self.n_further_tokens

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_parameters(self) -> int:
        return self.dim * (3 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim


class ByWindow(dict[int, Any]):
    """An argument of blocks, such as rotary tables, by the window of their attention."""


class ByMixer(dict[Hashable, Any]):
    """An argument of blocks, such as the mask, by the `kind_of_context` of their mixer."""


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)); with norms "after": x +
    norm(attention(x)), then x + norm(feed_forward(x)); with "both": x + norm(attention(norm(x))), then x +
    norm(feed_forward(norm(x))). feed_forward: by default SwiGLU."""

    watch = staticmethod(watch)

    def __init__(self, config: DecoderConfig, attention: Mixer, feed_forward: nn.Module | None = None) -> None:
        super().__init__()

        def norm(place: str) -> RMSNorm | None:
            role = POST_NORM if place == "after" else NORM
            return norm_of(config, config.dim, role) if config.norms in (place, "both") else None

        self.attention_norm = norm("before")
        self.attention = attention
        self.attention_post_norm = norm("after")
        self.ffn_norm = norm("before")
        self.feed_forward = feed_forward or FeedForward(config.dim, config.ffn_dim)
        self.ffn_post_norm = norm("after")

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None, *more: Tensor | None) -> Tensor:
        """x: (batch, seq_len, dim); mask: see Mixer.context; more: further arguments of feed_forward. Returns the same
        shape."""
        attended = self.attention(_normalized(self.attention_norm, x), rope, mask)
        x = x + _normalized(self.attention_post_norm, attended)
        out = self.feed_forward(_normalized(self.ffn_norm, x), *more)
        return x + _normalized(self.ffn_post_norm, out)


class DenseBlock(Block):
    """A block without experts in a decoder with them."""

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None, *_of_experts: Tensor | None) -> Tensor:
        return super().forward(x, rope, mask)


class FurtherBlock(Block):
    """A block that predicts the token after the next one, from what the output layer gets at a position and the
    embedding of the next token (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2). Embedding and output
    layer are those of the model."""

    def __init__(self, config: DecoderConfig, attention: Mixer, feed_forward: nn.Module | None = None) -> None:
        super().__init__(config, attention, feed_forward)
        self.embedding_norm = norm_of(config, config.dim)
        self.hidden_norm = norm_of(config, config.dim)
        self.projection = OwnPositions(2 * config.dim, config.dim, bias=False)
        self.output_norm = norm_of(config, config.dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, embeddings: Tensor, rope: RotaryTables, mask: AttentionMask | None, *more: Tensor | None
    ) -> Tensor:
        """x: what the output layer gets; embeddings: of the next tokens; both (batch, seq_len, dim). Returns x, and the
        rows for the prediction of the further token after it."""
        joined = self.projection(torch.cat((self.embedding_norm(embeddings), self.hidden_norm(x)), dim=-1))
        return torch.cat((x, self.output_norm(super().forward(joined, rope, mask, *more))))


def norm_of(config: DecoderConfig, dim: int, role: Role = NORM) -> RMSNorm:
    """A norm of width `dim`."""
    return RMSNorm(dim, config.norm_eps, config.norm_offset, role)


def _normalized(norm: RMSNorm | None, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


class Decoder(LanguageModel):
    """Decoder. Weights are uninitialized; buffers are undefined until `init_buffers`.

    block: returns the block of a layer, by its index: a Block, or a module that is called like one. scaling: of the
    rotary wavelengths; None for no scaling.
    local_rope: rotary embeddings of layers with a window; None: those of all layers.
    carried: numbers per position that blocks pass on beside the residual stream: with any, blocks are called with them
    as the last argument, (batch, seq_len, …), and return (x, what they pass on); zeros before the first one. A family
    with them has the boundary dim + carried.
    `layers` is keyed "0" … "n_layers - 1", so that a pipeline stage with some of the layers has the same names. With
    n_further_tokens, a FurtherBlock follows, and further_embeddings is the embedding, which also the last stage has.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block: Callable[[int], nn.Module],
        scaling: RopeScaling | None = None,
        *,
        local_rope: RotaryEmbedding | None = None,
        carried: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.carried = carried
        # nn.Embedding(...) does the same, but on the meta device it imports torch._dynamo, which takes half a second
        embeddings = torch.randn(config.vocab_size, config.dim)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding.from_pretrained(embeddings, freeze=False)
        self.layers = nn.ModuleDict({str(index): block(index) for index in range(config.n_blocks)})
        self.norm: RMSNorm | None = norm_of(config, config.dim, LAST_NORM)
        self.predicts_further = config.n_further_tokens > 0
        self.further_embeddings = self.tok_embeddings if self.predicts_further else None
        self.output: OutputLayer | None = OutputLayer(config.dim, config.vocab_size)
        self.output.soft_cap = config.logit_cap
        self.rope = RotaryEmbedding(config.rotary_dim, config.max_seq_len, config.rope_theta, scaling)
        self.local_rope = local_rope
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's parameter with the output layer, if the configuration ties them.

        Call it again after anything that replaces parameters module by module: to_empty, parallelize_module.
        """
        embeddings = self.further_embeddings if self.tok_embeddings is None else self.tok_embeddings
        if self.config.tie_embeddings and embeddings is not None and self.output is not None:
            self.output.weight = next(embeddings.parameters())

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary tables on `device`, in promote_types(the parameters' dtype, float32), and the biases of
        experts."""
        dtype = next(self.parameters()).dtype
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.init_buffers(device, torch.promote_types(dtype, torch.float32))
        for mixture in mixtures_of([self]):
            mixture.init_buffers(device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_valid: Tensor | None = None,
        is_token: Tensor | None = None,
        next_tokens: Tensor | None = None,
        further_labels: Tensor | None = None,
    ) -> Tensor:
        """See LanguageModel. positions: below max_seq_len, for the rotary embeddings. is_token: for experts, see
        MixtureOfExperts. next_tokens: with n_further_tokens, the token after each one; its predictions are further rows
        of the logits, or with further_labels, as labels, a term of the objective: see OutputLayer."""
        rope = self.tables(positions)
        further = None if next_tokens is None else self.further_block
        x, embeddings = self.embedded(tokens, None if further is None else next_tokens)
        mask = self.masks(document_ids, x.dtype)
        of_experts = (is_token,) if self.config.n_experts > 1 else ()
        x = self.run_blocks(x, rope, mask, *of_experts)
        x = x if self.norm is None else self.norm(x)
        if further is not None:
            arguments = (_of_layer(further, each) for each in (rope, mask, *of_experts))
            x = further(x, embeddings, *arguments)
        more = () if further is None else (further_labels,)
        return x if self.output is None else self.output(x, labels, num_valid, *more)

    @property
    def further_block(self) -> nn.Module | None:
        """That of this stage."""
        return next((layer for layer in self.layers.values() if isinstance(layer, FurtherBlock)), None)

    def embedded(self, tokens: Tensor, next_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input of the blocks of this stage, and the embeddings of the next tokens."""
        if next_tokens is None:
            return (tokens if self.tok_embeddings is None else self.scaled(self.tok_embeddings(tokens))), None
        if self.tok_embeddings is None:
            assert self.further_embeddings is not None
            return tokens, self.scaled(self.further_embeddings(next_tokens))
        # one call, since FSDP gathers for each
        own, following = self.scaled(self.tok_embeddings(torch.cat((tokens, next_tokens)))).chunk(2)
        return own, following

    def scaled(self, embeddings: Tensor) -> Tensor:
        """The embeddings times embedding_scale of the configuration, rounded to their dtype."""
        if self.config.embedding_scale == 1:
            return embeddings
        return embeddings * torch.tensor(self.config.embedding_scale, dtype=embeddings.dtype, device="cpu").item()

    def tables(self, positions: Tensor | None) -> RotaryTables | ByWindow:
        """The rotary tables of all blocks of this stage, or those for each of their windows."""
        windows = self.windows()
        if self.local_rope is None or not any(windows):
            everywhere: RotaryTables = self.rope(positions)
            return everywhere
        found: dict[bool, RotaryTables] = {False: self.rope(positions), True: self.local_rope(positions)}
        return ByWindow({window: found[window > 0] for window in windows})

    def windows(self) -> set[int]:
        """The windows of the blocks of this stage; 0: none."""
        return {window_of(layer) for layer in self.layers.values()}

    def masks(self, document_ids: Tensor | None, dtype: torch.dtype) -> AttentionMask | ByMixer | None:
        """What all blocks of this stage know of documents, or that of each kind of their mixers."""
        mixers = {mixer.kind_of_context: mixer for mixer in map(mixer_of, self.layers.values())}
        found = ByMixer(
            (kind, mixer.context(document_ids, dtype, self.config.head_dim, self.attention_mask))
            for kind, mixer in mixers.items()
        )
        return found if len(found) > 1 else next(iter(found.values()), None)

    def run_blocks(self, x: Tensor, *arguments: Any) -> Tensor:
        """Apply the blocks of this stage. x: the embeddings, or what the previous stage has returned. arguments: of
        each block after x. A stage passes what is carried behind x, along the last dimension."""
        if not self.carried:
            for layer in self.layers.values():
                if not isinstance(layer, FurtherBlock):
                    x = layer(x, *(_of_layer(layer, each) for each in arguments))
            return x
        x, more = x[..., : self.config.dim], x[..., self.config.dim :]
        if self.tok_embeddings is not None:
            more = x.new_zeros(*x.shape[:2], self.carried)
        for layer in self.layers.values():
            x, more = layer(x, *(_of_layer(layer, each) for each in arguments), more)
        # with tp, more may hold all positions of a part of its numbers
        return x if self.output is not None else torch.cat((x, more.reshape(*x.shape[:2], self.carried)), dim=-1)


PLAIN = Mixer()
"""In place of that of a block without one: its module gets the mask of attention without a window."""


def mixer_of(layer: nn.Module) -> Mixer:
    found = getattr(layer, "attention", None)
    return found if isinstance(found, Mixer) else PLAIN


def window_of(layer: nn.Module) -> int:
    """The window of the attention of a block; 0: none."""
    return mixer_of(layer).window


def _of_layer(layer: nn.Module, argument: Any) -> Any:
    if isinstance(argument, ByMixer):
        return argument[mixer_of(layer).kind_of_context]
    return argument[window_of(layer)] if isinstance(argument, ByWindow) else argument


def decoder_structure(config: DecoderConfig) -> Structure:
    """Structure with these units: the embedding, each block, and the head (final norm and output). With tied
    embeddings, or a block that predicts further tokens, the embedding and the head share a parameter."""
    blocks = {f"layers.{index}": index for index in range(config.n_blocks)}
    further = ("further_embeddings",) if config.n_further_tokens else ()
    units = (("tok_embeddings",), *((block,) for block in blocks), ("norm", "output", *further))
    same = (*further, *(("output",) if config.tie_embeddings else ()))
    shared = {"tok_embeddings.weight": tuple(f"{name}.weight" for name in same)} if same else {}
    return Structure(units, blocks, shared, last=1 + config.n_further_tokens)


def decoder_family(
    name: str,
    flavors: Mapping[str, DecoderConfig],
    check: Callable[[Any, int, int, int], list[Problem]],
    build: Callable[[Any], Decoder],
    hugging_face: HuggingFace,
    needs: Mapping[str, Needs] | None = None,
) -> Family:
    """The Family of a decoder with this module's structure and FLOPs. Arguments: see Family."""
    return Family(
        name=name,
        config_type=type(flavors["debug"]),
        flavors=flavors,
        check=check,
        build=build,
        structure=decoder_structure,
        flops_per_token=flops_per_token,
        hugging_face=hugging_face,
        needs=needs or {},
    )


def matmul_parameters(config: DecoderConfig) -> list[int]:
    """Number of weights of each block that multiply a token: all but the norms, and the experts that it does not
    use."""
    experts = config.n_active_experts + config.n_shared_experts
    router = config.dim * (config.n_experts + config.gates_shared) if config.n_experts > 1 else 0
    sparse, dense = 3 * config.dim * config.ffn_dim * experts + router, 3 * config.dim * config.dense_ffn_dim
    number = config.n_dense_layers
    feed_forward = [dense] * number + [sparse] * (config.n_blocks - number)
    attention = [config.linear_parameters if linear else config.attention_parameters for linear in config.linear_layers]
    further = [0] * config.n_layers + [2 * config.dim**2] * config.n_further_tokens
    return [sum(each) for each in zip(attention, feed_forward, further, strict=True)]


def describe_size(num_parameters: int, config: Any) -> str:
    """The number of parameters, and without the experts that a token does not use if there are any. config: of any
    family."""
    text, idle = f"{num_parameters:,} parameters", idle_parameters(config)
    return f"{text}, {num_parameters - idle:,} of them active" if idle else text


def idle_parameters(config: Any) -> int:
    """The number of parameters of experts that a token does not use. config: of any family; 0 if it is no
    DecoderConfig."""
    if not isinstance(config, DecoderConfig):
        return 0
    weights, biases = 3 * config.dim * config.ffn_dim, 2 * config.ffn_dim + config.dim  # of w1, w2 and w3
    per_expert = weights + (biases if config.expert_biases else 0)
    return (config.n_blocks - config.n_dense_layers) * per_expert * (config.n_experts - config.n_active_experts)


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of matrix products per trained token, forward and backward: 6N + 12·L·T·H. In a layer
    with a window, T is at most the window.

    N are the matmul_parameters of all blocks and those of the output layer, for each predicted token, tied or not: 2
    operations per weight
    forward, 4 backward. Attention multiplies each query with T keys and T values in each of L layers: 4·T·H operations
    forward and twice that backward, where H is n_heads * head_dim (the mean of both products' widths, if values have
    another). As is usual for MFU, the full T x T products count although a causal kernel may skip half of them, and
    recomputation does not count. Source: Chowdhery et al., "PaLM" (2022), appendix B.
    Gated linear attention reads a state, corrects it and reads it again, 6 operations per number of it forward.
    """
    heads = 1 + config.n_further_tokens
    return 6 * heads * config.vocab_size * config.dim + sum(flops_of_blocks(config, seq_len))


def flops_of_blocks(config: Any, seq_len: int) -> list[int]:
    """The part of each block in flops_per_token. config: of any family; [] if it is no DecoderConfig."""
    if not isinstance(config, DecoderConfig):
        return []
    heads = 6 * config.n_heads * (config.head_dim + config.value_dim)
    states = 18 * config.linear_value_heads * config.linear_key_dim * config.linear_value_dim
    of_attention = [
        states if is_linear else min(window or seq_len, seq_len) * heads
        for window, is_linear in zip(config.windows, config.linear_layers, strict=True)
    ]
    return [6 * n + flops for n, flops in zip(matmul_parameters(config), of_attention, strict=True)]


_SIZE = Range("a positive number in this range", least=1, most=2**31 - 1)
_FACTOR = Range("leave it out for the default", above=0, below=math.inf)
_COEFFICIENT = Range("0.0 for none; 0.001 is usual", least=0, below=math.inf)
RANGES = {
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len"), _SIZE),
    **dict.fromkeys(("n_active_experts", "rope_original_seq_len", "query_pre_attn_scalar"), _SIZE),
    **dict.fromkeys(("base_dim", "base_layers"), replace(_SIZE, least=0, remedy="0 for no base model")),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "dense_ffn_dim"), _SIZE),
    **dict.fromkeys(("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim"), _SIZE),
    "linear_taps": replace(_SIZE, most=64),
    "partial_rotary_factor": Range("0.25 is usual", least=0, most=1),
    **dict.fromkeys(("n_groups", "n_active_groups"), replace(_SIZE, remedy="1 for no groups")),
    **dict.fromkeys(
        ("q_lora_rank", "n_dense_layers", "n_shared_experts"), replace(_SIZE, least=0, remedy="0 for none")
    ),
    "n_layers": replace(_SIZE, most=10_000),
    "n_further_tokens": Range("0 for none", least=0, most=1),
    "no_rope_interval": Range(
        "a number above model.n_layers for rotary embeddings in all layers", least=2, most=2**31 - 1
    ),
    "full_interval": Range("1 for full attention in all layers", least=1, most=2**31 - 1),
    **dict.fromkeys(("logit_cap", "score_cap"), Range("0.0 for none", least=0, below=math.inf)),
    "sliding_window": Range("0 for none", least=0, most=2**31 - 1),
    "n_experts": Range("another family, such as qwen3, has one feed-forward layer per block", least=2, most=2**31 - 1),
    **dict.fromkeys(("norm_eps", "rope_low_freq_factor", "rope_high_freq_factor"), _FACTOR),
    "init_std": Range("0.02 is usual", above=0, below=math.inf),
    **dict.fromkeys(("rope_beta_fast", "rope_beta_slow", "rope_mscale", "route_scale"), _FACTOR),
    **dict.fromkeys(("rope_theta", "rope_local_theta"), replace(_FACTOR, above=1)),
    "rope_scaling_factor": Range("1.0 for no scaling", least=1, below=math.inf),
    **dict.fromkeys(("balance_loss", "z_loss"), _COEFFICIENT),
    "bias_rate": replace(_COEFFICIENT, below=1),
}
"""Valid values of the hyper-parameters, of those that a family has. At most 10,000 layers: a check must end."""


def check_decoder(config: Any, seq_len: int, tp: int, pp: int) -> list[Problem]:  # noqa: ARG001
    """Problems of the hyper-parameters, for sequences of `seq_len` tokens and degrees tp and pp.

    config: a DecoderConfig that is a dataclass. A family adds the rules for its own hyper-parameters.
    """
    rules = Rules("model", config)
    for name in (field.name for field in fields(config) if field.name in RANGES):
        rules.require(name, RANGES[name].has(getattr(config, name)), str(RANGES[name]), RANGES[name].remedy)
    if not rules.problems and tp >= 1:
        heads, rows = config.n_heads, math.ceil(config.vocab_size / tp)
        shared = heads % config.n_kv_heads == 0
        rules.require("n_kv_heads", shared, f"divides model.n_heads = {heads}", "change one of them")
        fewer, rule = config.n_active_experts <= config.n_experts, f"at most model.n_experts = {config.n_experts}"
        rules.require("n_active_experts", fewer, rule, "fewer, or more experts")
        for name in ("n_heads", "n_kv_heads", "ffn_dim"):
            rules.divides(name, "parallelism.tp", tp)
        rule = f"a part for each of parallelism.tp = {tp} ranks, in parts of {rows}"
        rules.require("vocab_size", rows * (tp - 1) < config.vocab_size, rule, "a larger vocabulary, or a smaller tp")
    if seq_len > config.max_seq_len:
        rule, remedy = f"at most model.max_seq_len = {config.max_seq_len}", "shorten the sequences, or raise this key"
        rules.problems.append(Problem("training.seq_len", seq_len, rule, remedy))
    return rules.problems


def check_head_width(config: DecoderConfig) -> list[Problem]:
    """Check that heads have an even width, for families with head_dim: embeddings rotate pairs."""
    rules = Rules("model", config)
    rules.require("head_dim", config.head_dim % 2 == 0, "even, since rotary embeddings rotate pairs", "128 is usual")
    return rules.problems


def check_windows(config: Any) -> list[Problem]:
    """Check that layers have a window, for families in which each full_interval-th layer has none."""
    rules = Rules("model", config)
    if config.sliding_window == 0:  # a negative one is a problem already
        rule, remedy = "at least 1 with model.full_interval above 1", "model.full_interval = 1 for full attention"
        rules.require("sliding_window", config.full_interval == 1, rule, remedy)
    return rules.problems


def check_width(config: DecoderConfig) -> list[Problem]:
    """Check that heads have an even width, for families in which head_dim is dim / n_heads: embeddings rotate pairs."""
    rules = Rules("model", config)
    if min(config.dim, config.n_heads) >= 1:  # else it is a problem already
        rules.divides("dim", "2 x model.n_heads", 2 * config.n_heads)
    return rules.problems
