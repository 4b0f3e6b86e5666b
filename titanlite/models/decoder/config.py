"""Hyper-parameters that every decoder has, the rules for them, and smaller ones of the same kind."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

from titanlite.models.sizes import size_alike
from titanlite.runtime.errors import Problem, require


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


_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")


def check_decoder(config: DecoderConfig, seq_len: int, tp: int, pp: int, *, published: str) -> list[Problem]:
    """What is wrong with the hyper-parameters above but head_dim, for sequences of `seq_len` tokens on these degrees.

    published: whose values the type's defaults are, for the remedies.
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
            "shorten the sequences or raise model.max_seq_len",
        ),
        *_check_layout(config, tp, pp),
    ]


def check_sizes(config: DecoderConfig, names: Iterable[str]) -> list[Problem]:
    """Those hyper-parameters are at least 1."""
    problems: list[Problem] = []
    for name in names:
        value = getattr(config, name)
        problems += require(value >= 1, f"model.{name}", value, "at least 1", "a positive number")
    return problems


def check_positive(config: DecoderConfig, names: Iterable[str], published: str) -> list[Problem]:
    """Those hyper-parameters, which have defaults, are above 0 and finite."""
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
    if min(heads, config.n_kv_heads) < 1:
        return []  # reported already; divisibility means nothing here
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
    """What tensor parallelism cuts is divisible; what a pipeline puts on different stages is not shared."""
    problems: list[Problem] = []
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(config, name)
        problems += require(
            tp < 1 or value < 1 or value % tp == 0,
            f"model.{name}",
            value,
            f"a multiple of parallelism.tp = {tp}, whose ranks share it evenly",
            f"parallelism.tp = {math.gcd(value, tp)}, or model.{name} = {math.ceil(value / max(tp, 1)) * tp}",
        )
    return problems + require(
        pp <= 1 or not config.tie_embeddings,
        "model.tie_embeddings",
        config.tie_embeddings,
        f"false with parallelism.pp = {pp}: the embedding is on the first stage, the output on the last",
        "parallelism.pp = 1 with dp_shard or tp instead, or model.tie_embeddings = false",
    )


TINY_HEAD_DIM = 8


def shrunk_counts(config: DecoderConfig, ranks: int) -> dict[str, Any]:
    """n_layers, n_heads and n_kv_heads of a tiny model of the same kind, see Family.

    Of several query heads per key/value head two remain.
    """
    n_kv_heads = math.gcd(config.n_kv_heads, ranks)
    n_heads = n_kv_heads * min(config.n_heads // config.n_kv_heads, 2)
    return {"n_layers": min(config.n_layers, 2 * ranks), "n_heads": n_heads, "n_kv_heads": n_kv_heads}


def shrunk_widths(config: DecoderConfig, dim: int, ranks: int) -> dict[str, Any]:
    """dim and ffn_dim beside it."""
    return {"dim": dim, "ffn_dim": size_alike(config.ffn_dim, 2 * dim, ranks)}
