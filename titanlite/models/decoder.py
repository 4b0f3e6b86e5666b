"""Decoder in plain torch, shared by families with pre-norm blocks, rotary embeddings, grouped-query attention and
SwiGLU. The file of a family adds its specifics."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask
from titanlite.models.experts import MixtureOfExperts, mixtures_of
from titanlite.models.family import DecoderConfig, LanguageModel, Plan, TensorStyle
from titanlite.models.head import OutputLayer
from titanlite.models.init import Init
from titanlite.models.layers import Attention, FeedForward, RMSNorm, RopeScaling, RotaryEmbedding, RotaryTables
from titanlite.runtime.errors import Problem, require


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)). feed_forward: by default
    SwiGLU."""

    def __init__(self, config: DecoderConfig, attention: Attention, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = feed_forward or FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None, *more: Tensor | None) -> Tensor:
        """x: (batch, seq_len, dim); mask: see Attention; more: further arguments of feed_forward. Returns the same
        shape."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x), *more)
        return out


class Decoder(LanguageModel):
    """Pre-norm decoder. Weights are uninitialized; buffers are undefined until `init_buffers`.

    attention, feed_forward: return these modules of one block; None: SwiGLU. scaling: of the rotary wavelengths; None
    for no scaling.
    `layers` is keyed "0" … "n_layers - 1", so that a pipeline stage with some of the layers has the same names.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: Callable[[], Attention],
        scaling: RopeScaling | None = None,
        feed_forward: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        # nn.Embedding(...) does the same, but on the meta device it imports torch._dynamo, which takes half a second
        embeddings = torch.randn(config.vocab_size, config.dim)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding.from_pretrained(embeddings, freeze=False)
        self.layers = nn.ModuleDict(
            {
                str(index): Block(config, attention(), feed_forward() if feed_forward else None)
                for index in range(config.n_layers)
            }
        )
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        self.output: OutputLayer | None = OutputLayer(config.dim, config.vocab_size)
        self.rope = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta, scaling)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's parameter with the output layer, if the configuration ties them.

        Call it again after anything that replaces parameters module by module: to_empty, parallelize_module.
        """
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, "tied, and on different stages"
            assert self.output is not None, "tied, and on different stages"
            self.output.weight = next(self.tok_embeddings.parameters())

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary tables on `device`, in promote_types(the parameters' dtype, float32), and the biases of
        experts."""
        dtype = next(self.parameters()).dtype
        self.rope.init_buffers(device, torch.promote_types(dtype, torch.float32))
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
    ) -> Tensor:
        """See LanguageModel. positions: below max_seq_len, for the rotary embeddings. is_token: for experts, see
        MixtureOfExperts."""
        rope = self.rope(positions)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = self.attention_mask(document_ids, x.dtype, self.config.head_dim)
        of_experts = (is_token,) if self.config.n_experts > 1 else ()
        for layer in self.layers.values():
            x = layer(x, rope, mask, *of_experts)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels, num_valid)


def mixture_of_experts(config: DecoderConfig, *, normalize: bool = True) -> MixtureOfExperts:
    """Feed-forward module of one block, with experts. normalize: see MixtureOfExperts."""
    return MixtureOfExperts(
        config.dim,
        config.ffn_dim,
        config.n_experts,
        config.n_active_experts,
        balance_loss=config.balance_loss,
        z_loss=config.z_loss,
        bias_rate=config.bias_rate,
        normalize=normalize,
    )


def init(config: DecoderConfig, name: str) -> Init:
    """Distribution of the parameter `name`: norms 1, matrices normal with std 0.02.

    The std of matrices that write into the residual stream (wo, w2) is multiplied by 1/sqrt(number of such matrices) =
    1/sqrt(2 * n_layers), so that the variance of the residual stream does not grow with depth (Radford et al., "GPT-2",
    2019, section 2.3).
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "norm" or module.endswith("_norm"):
        return Init("ones")
    if module in ("wo", "w2"):
        return Init("normal", 0.02 / math.sqrt(2 * config.n_layers))
    assert module in ("tok_embeddings", "output", "wq", "wk", "wv", "w1", "w3", "router"), (
        f"no initial distribution for {name}"
    )
    return Init("normal", 0.02)


TENSOR_STYLES: dict[str, TensorStyle] = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wk": "column",
    "layers.*.attention.wv": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "column",
    "layers.*.feed_forward.w3": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "norm",
    "output": "logits",
}


def decoder_plan(config: DecoderConfig, tensor_styles: Mapping[str, TensorStyle]) -> Plan:
    """Plan with these units: the embedding, each block, and the head (final norm and output).

    With tied embeddings, the embedding and the head share a parameter and form one unit.
    """
    blocks = {f"layers.{index}": index for index in range(config.n_layers)}
    units: list[tuple[str, ...]] = [(block,) for block in blocks]
    if config.tie_embeddings:
        units = [*units, ("tok_embeddings", "norm", "output")]
    else:
        units = [("tok_embeddings",), *units, ("norm", "output")]
    return Plan(tuple(units), blocks, tensor_styles)


def num_matmul_parameters(config: DecoderConfig) -> int:
    """Number of weights that multiply a token: all but the norms, the embedding, and the experts that it does not use.

    The output layer counts, tied or not.
    """
    attention = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.head_dim
    n_experts, n_active = config.n_experts, config.n_active_experts
    feed_forward = 3 * config.dim * config.ffn_dim * n_active + (config.dim * n_experts if n_experts > 1 else 0)
    return config.n_layers * (attention + feed_forward) + config.vocab_size * config.dim


def describe_size(num_parameters: int, config: Any) -> str:
    """The number of parameters, and without the experts that a token does not use if there are any. config: of any
    family."""
    text = f"{num_parameters:,} parameters"
    if not isinstance(config, DecoderConfig) or config.n_experts == config.n_active_experts:
        return text
    idle = config.n_layers * 3 * config.dim * config.ffn_dim * (config.n_experts - config.n_active_experts)
    return f"{text}, {num_parameters - idle:,} of them active"


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of matrix products per trained token, forward and backward: 6N + 12·L·T·H.

    N is num_matmul_parameters: 2 operations per weight forward, 4 backward. Attention multiplies each query with T keys
    and T values in each of L layers: 4·T·H operations forward and twice that backward, where H is n_heads * head_dim.
    As is usual for MFU, the full T x T products count although a causal kernel may skip half of them, and recomputation
    does not count. Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    heads = config.n_heads * config.head_dim
    return 6 * num_matmul_parameters(config) + 12 * config.n_layers * seq_len * heads


MAX_LAYERS = 10_000
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")


def check_decoder(config: DecoderConfig, seq_len: int, tp: int, pp: int, *, published: str) -> list[Problem]:
    """Check the hyper-parameters of a decoder except head_dim, for sequences of `seq_len` tokens and degrees tp and pp.

    published: name of the model that the config type's defaults come from, for the remedies.
    """
    return [
        *check_sizes(config, _SIZES),
        *check_positive(config, ["norm_eps"], published),
        *_check_sharing(config),
        *require(
            1.0 < config.rope_theta < math.inf,
            "model.rope_theta",
            config.rope_theta,
            "above 1 and finite",
            default_remedy(config, "rope_theta", published),
        ),
        *require(
            seq_len <= config.max_seq_len,
            "training.seq_len",
            seq_len,
            f"at most model.max_seq_len = {config.max_seq_len}",
            "shorten the sequences or increase model.max_seq_len",
        ),
        *_check_layout(config, tp, pp),
    ]


def check_width(config: DecoderConfig) -> list[Problem]:
    """Check that n_heads divides dim into heads of even width, for families in which head_dim is dim / n_heads."""
    if min(config.dim, config.n_heads) < 1:
        return []  # reported by check_sizes
    if config.dim % config.n_heads:
        pairs = 2 * config.n_heads
        return require(
            False,
            "model.dim",
            config.dim,
            f"a multiple of model.n_heads = {config.n_heads}",
            f"{math.ceil(config.dim / pairs) * pairs} is the next value with an even head width",
        )
    return require(
        config.head_dim % 2 == 0,
        "model.dim",
        config.dim,
        f"dim / n_heads must be even, since rotary embeddings rotate pairs (it is {config.head_dim})",
        f"{config.dim + config.n_heads}, or another number of heads",
    )


def check_experts(config: DecoderConfig, published: str) -> list[Problem]:
    """Check the hyper-parameters of experts. published: as for check_decoder."""
    return [
        *check_sizes(config, ["n_active_experts"]),
        *require(
            config.n_experts >= 2,
            "model.n_experts",
            config.n_experts,
            "at least 2",
            "another family, such as qwen3, has one feed-forward layer per block",
        ),
        *require(
            config.n_active_experts <= config.n_experts,
            "model.n_active_experts",
            config.n_active_experts,
            f"at most model.n_experts = {config.n_experts}",
            f"{min(config.n_experts, 8)}, or more experts",
        ),
        *require(
            0.0 <= config.balance_loss < math.inf,
            "model.balance_loss",
            config.balance_loss,
            "at least 0 and finite",
            f"{default_remedy(config, 'balance_loss', published)}; 0.0: no balance loss",
        ),
        *require(
            0.0 <= config.z_loss < math.inf,
            "model.z_loss",
            config.z_loss,
            "at least 0 and finite",
            "0.0: no z-loss; 0.001 is usual",
        ),
        *require(
            0.0 <= config.bias_rate < 1.0,
            "model.bias_rate",
            config.bias_rate,
            "at least 0 and below 1, as it changes probabilities",
            "0.0: no biases; 0.001 is usual",
        ),
    ]


def check_sizes(config: DecoderConfig, names: Iterable[str]) -> list[Problem]:
    """Check that the hyper-parameters `names` are at least 1, and not so large that a check would never end."""
    problems: list[Problem] = []
    for name in names:
        value, most = getattr(config, name), MAX_LAYERS if name == "n_layers" else 2**31 - 1
        rule = "at least 1" if value < 1 else f"at most {most:,}"
        problems += require(1 <= value <= most, f"model.{name}", value, rule, "a positive number in this range")
    return problems


def check_positive(config: DecoderConfig, names: Iterable[str], published: str) -> list[Problem]:
    """Check that the hyper-parameters `names`, which have defaults, are above 0 and finite."""
    problems: list[Problem] = []
    for name in names:
        value = getattr(config, name)
        remedy = default_remedy(config, name, published)
        problems += require(0.0 < value < math.inf, f"model.{name}", value, "above 0 and finite", remedy)
    return problems


def default_remedy(config: DecoderConfig, name: str, published: str) -> str:
    return f"{getattr(type(config), name)} is what {published} uses"


def _check_sharing(config: DecoderConfig) -> list[Problem]:
    heads = config.n_heads
    if check_sizes(config, ["n_heads", "n_kv_heads"]):
        return []  # reported already
    lower = [number for number in range(1, math.isqrt(heads) + 1) if heads % number == 0]
    divisors = sorted({*lower, *(heads // number for number in lower)})
    return require(
        config.n_kv_heads in divisors,
        "model.n_kv_heads",
        config.n_kv_heads,
        f"divides model.n_heads = {heads}",
        f"one of {', '.join(map(str, divisors))}",
    )


def _check_layout(config: DecoderConfig, tp: int, pp: int) -> list[Problem]:
    """Check that tp divides the sharded sizes, and that a pipeline does not put tied weights on different stages."""
    problems: list[Problem] = []
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(config, name)
        problems += require(
            tp < 1 or value < 1 or value % tp == 0,
            f"model.{name}",
            value,
            f"a multiple of parallelism.tp = {tp}",
            f"parallelism.tp = {math.gcd(value, tp)}, or model.{name} = {math.ceil(value / max(tp, 1)) * tp}",
        )
    rows = math.ceil(config.vocab_size / max(tp, 1))
    problems += require(
        config.vocab_size < 1 or rows * (tp - 1) < config.vocab_size,
        "model.vocab_size",
        config.vocab_size,
        f"each of parallelism.tp = {tp} ranks has a part of the vocabulary, in parts of {rows}",
        "a larger vocabulary, or a smaller parallelism.tp",
    )
    return problems + require(
        pp <= 1 or not config.tie_embeddings,
        "model.tie_embeddings",
        config.tie_embeddings,
        f"false with parallelism.pp = {pp}: the embedding is on the first stage, the output on the last",
        "parallelism.pp = 1 with dp_shard or tp instead, or model.tie_embeddings = false",
    )
