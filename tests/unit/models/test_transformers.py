"""All families against the models of Hugging Face transformers: logits, loss and the gradients of all parameters.

transformers computes RMSNorm, rotary tables and the softmax in float32 for every dtype of the model. The exact
comparison patches them to float64; the comparison without patches has the tolerance of float32.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plain_loss import cross_entropy_by_row
from tests.unit.hf.making import parameter_of
from tests.unit.models.shaken import perturbed_model
from titanlite.batch import IGNORE_INDEX
from titanlite.models.deepseek_v3 import DeepseekV3Config
from titanlite.models.family import Family, LanguageModel, saved_tensors
from titanlite.models.gemma2 import Gemma2Config
from titanlite.models.gemma3 import Gemma3Config
from titanlite.models.gpt_oss import GptOssConfig
from titanlite.models.hugging_face import stored_names, stored_tensors, unknown_fields
from titanlite.models.layers import RMSNorm
from titanlite.models.llama3 import Llama3Config
from titanlite.models.mistral import MistralConfig
from titanlite.models.olmo2 import Olmo2Config
from titanlite.models.olmo3 import Olmo3Config
from titanlite.models.olmoe import OlmoeConfig
from titanlite.models.qwen2 import Qwen2Config
from titanlite.models.qwen3 import Qwen3Config
from titanlite.models.qwen3_5 import Qwen35Config, Qwen35MoeConfig
from titanlite.models.qwen3_moe import Qwen3MoeConfig
from titanlite.models.qwen3_next import Qwen3NextConfig
from titanlite.models.registry import FAMILIES
from titanlite.models.smollm3 import Smollm3Config

EXACT, UNPATCHED = 1e-11, 1e-5
VOCAB_SIZE, SEQ_LEN = 131, 40

SMALL = {"norm_eps": 1e-3, "rope_theta": 1000.0, "max_seq_len": 64}
LLAMA3 = Llama3Config(32, 2, 4, 2, 48, VOCAB_SIZE, **SMALL)
# The wavelengths 6, 35 and more than 199 are unchanged, interpolated and scaled.
SCALED = replace(
    LLAMA3, rope_scaling_factor=8.0, rope_low_freq_factor=0.5, rope_high_freq_factor=3.0, rope_original_seq_len=32
)
STRETCHED = {"rope_scaling_factor": 8.0, "rope_beta_fast": 4.0, "rope_beta_slow": 0.5, "rope_original_seq_len": 32}
STRETCHED["max_seq_len"] = 256  # the scaled length: transformers warns about other ones
OF_EXPERTS = {"n_experts": 6, "n_active_experts": 3, "balance_loss": 0.0, "z_loss": 0.0}  # not in transformers
QWEN3 = Qwen3Config(32, 2, 4, 2, 48, VOCAB_SIZE, head_dim=16, **SMALL)
YARN = replace(QWEN3, **STRETCHED)
EXPERTS = Qwen3MoeConfig(32, 2, 4, 2, 24, VOCAB_SIZE, head_dim=16, **SMALL, **OF_EXPERTS)
OLMOE = OlmoeConfig(32, 2, 4, 2, 24, VOCAB_SIZE, **SMALL, **OF_EXPERTS)
QWEN2 = Qwen2Config(32, 2, 4, 2, 48, VOCAB_SIZE, **SMALL)
OLMO2 = Olmo2Config(32, 2, 4, 2, 48, VOCAB_SIZE, **SMALL)
OLMO3 = Olmo3Config(32, 3, 4, 2, 48, VOCAB_SIZE, **SMALL, sliding_window=7, full_interval=2)
OLMO3_YARN = replace(OLMO3, **STRETCHED)
SMOLLM3 = Smollm3Config(32, 3, 4, 2, 48, VOCAB_SIZE, **SMALL, no_rope_interval=2)
GPT_OSS = GptOssConfig(
    *(32, 3, 4, 2, 24, VOCAB_SIZE),
    **SMALL | OF_EXPERTS | {"head_dim": 16, "max_seq_len": 256, "sliding_window": 7, "rope_scaling_factor": 1.0},
)
GPT_OSS_YARN = replace(GPT_OSS, **STRETCHED)
MISTRAL = MistralConfig(32, 2, 4, 2, 48, VOCAB_SIZE, **SMALL, head_dim=16)
GEMMA = SMALL | {"head_dim": 16, "tie_embeddings": False, "sliding_window": 7, "query_pre_attn_scalar": 20}
# small caps, since the scores and logits of these models are small
GEMMA2 = Gemma2Config(32, 3, 4, 2, 48, VOCAB_SIZE, **GEMMA, score_cap=0.2, logit_cap=0.5)
GEMMA3 = Gemma3Config(
    *(32, 4, 4, 2, 48, VOCAB_SIZE), **GEMMA, full_interval=3, rope_local_theta=100.0, rope_scaling_factor=8.0
)
DEEPSEEK_V3 = DeepseekV3Config(
    *(32, 3, 4, 4, 24, VOCAB_SIZE),
    **SMALL,
    n_experts=8,
    n_active_experts=3,
    balance_loss=0.0,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    n_dense_layers=1,
    dense_ffn_dim=40,
    n_shared_experts=2,
    n_groups=4,
    n_active_groups=2,
)
DEEPSEEK_V3_YARN = replace(DEEPSEEK_V3, **STRETCHED, rope_mscale=0.7)
HYBRID = {
    **SMALL | {"head_dim": 16, "full_interval": 2, "partial_rotary_factor": 0.375},
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 6,
    "linear_value_dim": 10,
}
QWEN3_5 = Qwen35Config(32, 3, 4, 2, 48, VOCAB_SIZE, **HYBRID)
HYBRID_EXPERTS = HYBRID | OF_EXPERTS
QWEN3_5_MOE = Qwen35MoeConfig(32, 2, 4, 2, 24, VOCAB_SIZE, **HYBRID_EXPERTS)
QWEN3_NEXT = Qwen3NextConfig(32, 2, 4, 2, 24, VOCAB_SIZE, **HYBRID_EXPERTS)
CASES = {
    "llama3": LLAMA3,
    "llama3, tied": replace(LLAMA3, tie_embeddings=True),
    "llama3, no shared heads": replace(LLAMA3, n_kv_heads=4),
    "llama3, one shared head": replace(LLAMA3, n_kv_heads=1),
    "llama3, scaled": SCALED,
    "llama3, scaled and tied": replace(SCALED, tie_embeddings=True),
    "qwen3": QWEN3,
    "qwen3, tied": replace(QWEN3, tie_embeddings=True),
    "qwen3, narrow heads": replace(QWEN3, head_dim=6),
    "qwen3, no shared heads": replace(QWEN3, n_kv_heads=4),
    "qwen3, scaled": YARN,
    "qwen3, scaled in one step": replace(YARN, rope_beta_fast=0.6, rope_beta_slow=0.55),
    "qwen3, published scaling": replace(
        QWEN3, head_dim=64, rope_theta=1e6, rope_scaling_factor=4.0, max_seq_len=131_072
    ),
    "qwen3_moe": EXPERTS,
    "qwen3_moe, tied": replace(EXPERTS, tie_embeddings=True),
    "qwen3_moe, two active": replace(EXPERTS, n_active_experts=2),
    "qwen3_moe, all active": replace(EXPERTS, n_active_experts=6),
    "mistral": MISTRAL,
    "mistral, window": replace(MISTRAL, sliding_window=7),
    "mistral, window of a row": replace(MISTRAL, sliding_window=SEQ_LEN),
    "qwen2": QWEN2,
    "qwen2, tied": replace(QWEN2, tie_embeddings=True),
    "olmo2": OLMO2,
    "olmo2, no shared heads": replace(OLMO2, n_kv_heads=4),
    "olmo3": OLMO3,
    "olmo3, scaled": OLMO3_YARN,
    "olmo3, full attention": replace(OLMO3_YARN, full_interval=1, sliding_window=0),
    "olmo3, windows": replace(OLMO3_YARN, full_interval=4),
    "gpt_oss": GPT_OSS,
    "gpt_oss, scaled": GPT_OSS_YARN,
    "gpt_oss, windows, all active": replace(GPT_OSS, full_interval=4, n_active_experts=6, n_kv_heads=4),
    "smollm3": SMOLLM3,
    "smollm3, all rotated": replace(SMOLLM3, no_rope_interval=4),
    "gemma2": GEMMA2,
    "gemma2, tied": replace(GEMMA2, tie_embeddings=True),
    "gemma2, uncapped": replace(GEMMA2, score_cap=0.0, logit_cap=0.0),
    "gemma3": GEMMA3,
    "gemma3, full attention": replace(GEMMA3, full_interval=1, sliding_window=0),
    "gemma3, tied and unscaled": replace(GEMMA3, tie_embeddings=True, rope_scaling_factor=1.0),
    "gemma3, windows and a cap": replace(GEMMA3, full_interval=6, logit_cap=0.5),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, scaled": DEEPSEEK_V3_YARN,
    "deepseek_v3, plain queries, no groups": replace(
        DEEPSEEK_V3, q_lora_rank=0, n_groups=1, n_active_groups=1, n_dense_layers=0, tie_embeddings=True
    ),
    "qwen3_5": QWEN3_5,
    "qwen3_5, tied, one full layer": replace(QWEN3_5, tie_embeddings=True, full_interval=3, linear_taps=3),
    "qwen3_5, no shared heads": replace(QWEN3_5, linear_key_heads=4, n_kv_heads=4),
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next, two shared experts": replace(QWEN3_NEXT, n_shared_experts=2, linear_value_heads=6),
    "olmoe": OLMOE,
    "olmoe, tied": replace(OLMOE, tie_embeddings=True),
    "olmoe, no shared heads": replace(OLMOE, n_kv_heads=4),
}
SLOW = ("qwen3_5, tied, one full layer", "qwen3_5, no shared heads", "qwen3_5_moe", "qwen3_next, two shared experts")


def family_of(name: str) -> str:
    """The family of a case."""
    return name.partition(",")[0]


every_case = pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(family_of(name), config, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, config in CASES.items()
    ],
)
CODE = {FAMILIES[family_of(name)].hugging_face.model_type.removesuffix("_text") for name in CASES}
MODULES = (*(f"models.{name}.modeling_{name}" for name in sorted(CODE)), "modeling_rope_utils")


SHORT_CHUNKS = {"CHUNK": 8, "SEGMENT": 2}
"""Several chunks and segments in a row."""


class WideTorch:
    """A stand-in for torch in which float32 means float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    def tensor(self, value: Any, **options: Any) -> Tensor:
        is_float = isinstance(value, float)
        return torch.tensor(value, **({"dtype": torch.float64} if is_float else {}), **options)


@pytest.fixture
def float64_islands() -> Iterator[None]:
    """Patch transformers to compute in float64 what it computes in float32."""
    patches = [patch(f"transformers.{module}.torch", WideTorch()) for module in MODULES]
    patches.append(patch("torch.Tensor.float", torch.Tensor.double))
    patches += [patch(f"titanlite.models.delta_rule.{name}", number) for name, number in SHORT_CHUNKS.items()]
    for one in patches:
        one.start()
    yield
    for one in patches:
        one.stop()


def stored(tensors: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Views of a transformers model's tensors by their names in files: it stacks the matrices of most experts."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, stack = name.rpartition(".")
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stack)
        if kinds is None or name in names:
            found[name] = tensor
            continue
        for index, expert in enumerate(tensor.unbind()):
            matrices = zip(kinds, expert.chunk(len(kinds)), strict=True)
            found |= {f"{prefix}.{index}.{kind}.weight": matrix for kind, matrix in matrices}
    return found


def transformers_model(family: Family, config: Any, model: LanguageModel, **changes: Any) -> nn.Module:
    """The transformers model that our config.json describes, with our weights under its parameter names. changes: of
    its configuration."""
    import transformers  # imported here: it takes seconds, which test collection does not need

    # transformers' default for experts does not compute in float64
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    fields = family.hugging_face.config_json(config) | eager | changes
    other = getattr(transformers, family.hugging_face.architecture)(
        transformers.AutoConfig.for_model(family.hugging_face.model_type, **fields)
    )
    other = other.to(torch.float64)
    own = saved_tensors(model)
    weights = stored_tensors(own, family.hugging_face.names(config))
    with torch.no_grad():
        biases = {name: buffer for name, buffer in other.named_buffers() if name in weights}
        parameters = stored({**dict(other.named_parameters()), **biases}, weights)
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return other


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; the share of valid labels differs by row and is 0 in the last row."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB_SIZE, (3, SEQ_LEN), generator=generator)
    labels = torch.randint(VOCAB_SIZE, (3, SEQ_LEN), generator=generator)
    masked = torch.rand(3, SEQ_LEN, generator=generator) >= torch.tensor([[0.9], [0.3], [0.0]])
    return tokens, labels.masked_fill(masked, IGNORE_INDEX)


def relative(value: Tensor, expected: Tensor) -> float:
    assert value.dtype == expected.dtype == torch.float64
    return ((value - expected).norm() / expected.norm()).item()


def differences(family: Family, config: Any, change: Callable[[nn.Module], None] | None = None) -> dict[str, float]:
    """Relative errors of logits, loss and each gradient, by our parameter names. change: applied to our model."""
    model = perturbed_model(family, config)
    other = transformers_model(family, config, model)
    if change is not None:
        change(model)
    tokens, labels = batch()
    num_valid = (labels != IGNORE_INDEX).sum()
    logits, expected = model(tokens), other(input_ids=tokens, use_cache=False).logits
    loss = cross_entropy_by_row(logits, labels).sum() / num_valid
    mean = F.cross_entropy(expected.flatten(0, 1), labels.flatten())  # the mean over all valid tokens
    loss.backward()
    mean.backward()
    names = family.hugging_face.names(config)
    names = {name: stored for name, stored in names.items() if not name.endswith("feed_forward.bias")}  # no gradient
    expected_names = {each for name in names.values() for each in stored_names(name)}
    gradients = stored({name: parameter.grad for name, parameter in other.named_parameters()}, expected_names)
    found = {"logits": relative(logits, expected), "loss": relative(loss, mean)}
    for name, stored_name in names.items():
        found[name] = relative(model.get_parameter(name).grad, parameter_of(gradients, stored_name))
    return found


@pytest.mark.usefixtures("float64_islands")
@every_case
def test_logits_and_gradients_match_exactly(name: str, config: Any) -> None:
    found = differences(FAMILIES[name], config)
    assert {name: error for name, error in found.items() if not error <= EXACT} == {}


@pytest.mark.slow
@every_case
def test_unpatched_transformers_match_up_to_float32(name: str, config: Any) -> None:
    found = differences(FAMILIES[name], config)
    # transformers computes states of linear attention in float32, too
    bound = UNPATCHED * (10 if any(config.linear_layers) else 1)
    assert {name: error for name, error in found.items() if not error <= bound} == {}
    assert max(found.values()) > EXACT, "no error above EXACT: the patches of the exact comparison have no effect"


def adjacent_pairs(model: nn.Module) -> None:
    """Put wq and wk into the layout of Meta's files, in which rotary pairs are adjacent."""
    for layer in model.layers.values():
        for weight in (layer.attention.wq.weight, layer.attention.wk.weight):
            heads = weight.detach().clone().unflatten(0, (-1, layer.attention.head_dim // 2, 2))
            with torch.no_grad():
                weight.copy_(heads.transpose(1, 2).flatten(0, 2))


def missing_head_norm(model: nn.Module) -> None:
    norm = model.layers["1"].attention.q_norm
    norm.forward = lambda x: x * norm.weight


def norms_by_head(model: nn.Module) -> None:
    for norm in (model.layers["1"].attention.q_norm, model.layers["1"].attention.k_norm):
        norm.forward = lambda x, norm=norm: F.rms_norm(x, x.shape[-1:], eps=norm.eps) * norm.weight.view(x.shape[-2:])


def normalized_weights(model: nn.Module) -> None:
    model.layers["0"].feed_forward.normalize = True


def sinks_left_out(model: nn.Module) -> None:
    """They do not take part in the sum of the softmax."""
    for layer in model.layers.values():
        attend = layer.attention.attend
        layer.attention.attend = lambda *x, sinks, attend=attend, **window: attend(*x, **window) + 0 * sinks.sum()


def unclamped_up(model: nn.Module) -> None:
    experts = model.layers["1"].feed_forward.experts
    experts.activation = lambda gate, up: F.silu(1.702 * gate.clamp(max=7.0)) * (up + 1.0) / 1.702


def unweighted_bias(model: nn.Module) -> None:
    """The bias of each chosen expert is added as it is."""
    experts = model.layers["1"].feed_forward.experts
    weighted, bias = experts.weighted, experts.w2_bias

    def changed(x: Tensor, chosen: Tensor, weights: Tensor, *own: Tensor) -> Tensor:
        return weighted(x, chosen, weights, *own) + ((1 - weights).unsqueeze(-1) * bias[chosen]).sum(dim=-2)

    experts.weighted = changed


def softmax_before_the_choice(model: nn.Module) -> None:
    model.layers["0"].feed_forward.normalize = False


def whole_indexes(model: nn.Module) -> None:
    model.rope.scaling = replace(model.rope.scaling, truncates=True)
    model.init_buffers(torch.device("cpu"))


def not_interleaved(model: nn.Module) -> None:
    """Rows of w1 and w3 in halves, as if the folder had them one after the other."""
    experts = model.layers["0"].feed_forward.experts
    with torch.no_grad():
        both = torch.stack((experts.w1, experts.w3), dim=2).flatten(1, 2)
        for weight, half in zip((experts.w1, experts.w3), both.chunk(2, dim=1), strict=True):
            weight.copy_(half)


def swapped(first: str, second: str) -> Callable[[nn.Module], None]:
    def swap(model: nn.Module) -> None:
        one, other = model.get_parameter(first), model.get_parameter(second)
        with torch.no_grad():
            saved = one.clone()
            one.copy_(other)
            other.copy_(saved)

    return swap


def other_theta(model: nn.Module) -> None:
    model.rope.theta = 1001.0
    model.init_buffers(torch.device("cpu"))


def unscaled_attention(model: nn.Module) -> None:
    """Cosines and sines without the factor of YaRN."""
    model.rope.cos /= model.rope.scaling.table_factor
    model.rope.sin /= model.rope.scaling.table_factor


def other_range(model: nn.Module) -> None:
    model.rope.scaling = replace(model.rope.scaling, beta_fast=2.0)
    model.init_buffers(torch.device("cpu"))


def wider_windows(model: nn.Module) -> None:
    for layer in model.layers.values():
        layer.attention.window += layer.attention.window > 0


def all_rotated(model: nn.Module) -> None:
    for layer in model.layers.values():
        layer.attention.rotates = True


def without_local_rope(model: nn.Module) -> None:
    """Layers with a window have YaRN's rotary embeddings, too."""
    model.local_rope = None


def norm_of_the_sum(model: nn.Module) -> None:
    """A norm after the residual sum in place of before it."""
    block = model.layers["1"]

    def forward(x: Tensor, *of_attention: Any) -> Tensor:
        x = x + block.attention_post_norm(block.attention(x, *of_attention))
        return block.ffn_post_norm(x + block.feed_forward(x))

    block.forward = forward


def half_bias(model: nn.Module) -> None:
    """The second half of the queries has the bias of the first one, as with the wrong shard of it on a rank of tp."""
    bias = model.layers["1"].attention.wq.bias
    with torch.no_grad():
        bias.view(2, -1)[1] = bias.view(2, -1)[0]


def other_eps(model: nn.Module) -> None:
    model.norm.eps = 1.001e-3


def in_single_precision(model: nn.Module) -> None:
    forward = model.layers["0"].forward
    model.layers["0"].forward = lambda x, *others: forward(x.to(torch.float32).double(), *others)


def cap_after_the_mask(model: nn.Module) -> None:
    """Masked scores become -cap in place of -inf."""

    def capped(queries: Tensor, keys: Tensor, values: Tensor, _mask: None, *, cap: float) -> Tensor:
        scores = queries.shape[-1] ** -0.5 * queries @ keys.repeat_interleave(2, 1).mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = cap * torch.tanh(scores.masked_fill(hidden, -torch.inf) / cap)
        return scores.softmax(-1) @ values.repeat_interleave(2, 1)

    model.layers["1"].attention.attend = capped  # without a window


def without_offset(model: nn.Module) -> None:
    """Published weights as those of other norms."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.offset = 0.0


def swapped_bases(model: nn.Module) -> None:
    model.rope, model.local_rope = model.local_rope, model.rope


def scale_of_the_width(model: nn.Module) -> None:
    for layer in model.layers.values():
        layer.attention.query_factor = 1.0


def rotary_halves(model: nn.Module) -> None:
    """The halves of the rotated parts are pairs, in place of adjacent numbers."""
    forward = model.forward

    def changed(*inputs: Any) -> Tensor:
        with patch("titanlite.models.latent_attention.halves", lambda x: x):
            return forward(*inputs)

    model.forward = changed


def biased_weights(model: nn.Module) -> None:
    """The weights of the chosen experts have their biases in them."""
    mixture = model.layers["1"].feed_forward
    router, bias = mixture.router, mixture.bias.clone()
    mixture.bias.zero_()
    forward = router.forward
    router.forward = lambda x: (forward(x).sigmoid() + bias).clamp(1e-9, 1 - 1e-9).logit()


def mscale_once(model: nn.Module) -> None:
    for layer in model.layers.values():
        layer.attention.query_factor **= 0.5


def all_groups(model: nn.Module) -> None:
    model.layers["1"].feed_forward.n_active_groups = 4


def best_of_group(model: nn.Module) -> None:
    """A group counts as much as its best expert, not as its two best ones."""
    mixture = model.layers["1"].feed_forward
    choose, bias = mixture.choose, mixture.bias.clone()

    def changed(probabilities: Tensor) -> Tensor:
        groups = (probabilities + bias).unflatten(-1, (4, -1))
        best = groups.amax(-1).topk(2).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        mixture.n_active_groups = 4
        return choose(probabilities.unflatten(-1, (4, -1)).masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2))

    mixture.choose = changed


def eps_of_the_model(model: nn.Module) -> None:
    model.layers["1"].attention.kv_norm.eps = 1e-3


def states_not_passed_on(model: nn.Module) -> None:
    """Each chunk begins with states of 0."""
    forward = model.forward

    def scan(chunks: Any, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return chunks.solved_values, state.new_zeros(len(chunks.values), *state.shape), torch.zeros_like(state)

    def changed(*inputs: Any) -> Tensor:
        with patch("titanlite.models.delta_rule._scan", scan):
            return forward(*inputs)

    model.forward = changed


def decays_of_other_heads(model: nn.Module) -> None:
    weight = model.layers["0"].attention.a_log.weight
    with torch.no_grad():
        weight.copy_(weight.roll(1))


def unweighted_shared_expert(model: nn.Module) -> None:
    gate = model.layers["0"].feed_forward.shared.gate
    gate.forward = lambda x: 99.0 + 1e-9 * (x @ gate.weight.mT)


MISTAKES = {
    "states not passed from chunk to chunk": ("qwen3_5", states_not_passed_on),
    "decays of other heads": ("qwen3_5", decays_of_other_heads),
    "gates for queries": ("qwen3_5", swapped("layers.1.attention.wq.weight", "layers.1.attention.wg.weight")),
    "the shared expert has no weight": ("qwen3_next", unweighted_shared_expert),
    "rotary halves for pairs": ("deepseek_v3", rotary_halves),
    "biases in the weights of experts": ("deepseek_v3", biased_weights),
    "mscale once": ("deepseek_v3, scaled", mscale_once),
    "experts of all groups": ("deepseek_v3", all_groups),
    "groups by their best expert": ("deepseek_v3", best_of_group),
    "norm_eps in the norms of latent vectors": ("deepseek_v3", eps_of_the_model),
    "cap after the mask": ("gemma2", cap_after_the_mask),
    "(1 + w) is forgotten": ("gemma2", without_offset),
    "scores by the width of heads": ("gemma2", scale_of_the_width),
    "rotary base of the other kind": ("gemma3", swapped_bases),
    "rotary pairs are adjacent": ("llama3", adjacent_pairs),
    "a head norm is missing": ("qwen3", missing_head_norm),
    "w1 and w3 swapped": ("llama3", swapped("layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight")),
    "norms of a block swapped": ("llama3", swapped("layers.1.attention_norm.weight", "layers.1.ffn_norm.weight")),
    "head norms swapped": ("qwen3", swapped("layers.1.attention.q_norm.weight", "layers.1.attention.k_norm.weight")),
    "heads normalized one by one": ("olmoe", norms_by_head),
    "weights of experts normalized": ("olmoe", normalized_weights),
    "another rotary base": ("qwen3", other_theta),
    "another epsilon": ("qwen3", other_eps),
    "attention is not scaled": ("qwen3, scaled", unscaled_attention),
    "another range of pairs": ("qwen3, scaled", other_range),
    "a window of one position more": ("mistral, window", wider_windows),
    "a window of one position more, capped": ("gemma2", wider_windows),
    "rotary embeddings in all layers": ("smollm3", all_rotated),
    "YaRN in layers with a window": ("olmo3, scaled", without_local_rope),
    "a norm after the residual sum": ("olmo2", norm_of_the_sum),
    "the wrong part of a bias": ("qwen2", half_bias),
    "something in float32": ("llama3", in_single_precision),
    "sinks are left out of the sum": ("gpt_oss, scaled", sinks_left_out),
    "up is not clamped": ("gpt_oss, scaled", unclamped_up),
    "the bias of an expert is not weighted": ("gpt_oss, scaled", unweighted_bias),
    "softmax before the choice": ("gpt_oss, scaled", softmax_before_the_choice),
    "YaRN between whole indexes": ("gpt_oss, scaled", whole_indexes),
    "gate and up are not interleaved": ("gpt_oss, scaled", not_interleaved),
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64_islands")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_detected(mistake: str) -> None:
    name, change = MISTAKES[mistake]
    found = differences(FAMILIES[family_of(name)], SCALED if name == "llama3" else CASES[name], change)
    assert found["logits"] > 10 * EXACT
    assert max(found.values()) > 100 * EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "config"), [("gemma2", GEMMA2), ("gemma3", GEMMA3)])
def test_embeddings_are_scaled_by_a_factor_rounded_to_their_dtype(name: str, config: Any, dtype: torch.dtype) -> None:
    """Bit for bit as in transformers."""
    config = replace(config, dim=160, n_heads=8)  # sqrt(160) is 12.649, and 12.625 in bfloat16
    model = perturbed_model(FAMILIES[name], config)
    other = transformers_model(FAMILIES[name], config, model)
    expected = other.to(dtype).model.embed_tokens(batch()[0])
    assert torch.equal(model.to(dtype).scaled(model.tok_embeddings(batch()[0])), expected)


def test_rotary_scaling_changes_the_logits() -> None:
    """Otherwise the scaled cases would not test the scaling."""
    for name, configs in {"llama3": (LLAMA3, SCALED), "qwen3": (QWEN3, YARN)}.items():
        plain, scaled = (perturbed_model(FAMILIES[name], config)(batch()[0]) for config in configs)
        assert relative(plain, scaled) > 1e-3


class Warnings(logging.Handler):
    """Collects the warnings of transformers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    handler = Warnings()
    logging.getLogger("transformers").addHandler(handler)
    yield handler.messages
    logging.getLogger("transformers").removeHandler(handler)


ALL_CONFIGS = [
    *((name, config) for name, family in FAMILIES.items() for config in family.flavors.values()),
    *((family_of(name), config) for name, config in CASES.items()),
]


UNSAID = {"init_std", "init_by_depth", "z_loss"}
"""What config.json has no fields for."""


@pytest.mark.slow
def test_config_json_round_trips_through_transformers(tmp_path: Path, warnings: list[str]) -> None:
    """Without warnings. The form that transformers saves (that of version 5) has the same meaning."""
    import transformers

    for name, config in ALL_CONFIGS:
        hf = FAMILIES[name].hugging_face
        fields = {"model_type": hf.model_type, "architectures": [hf.architecture]} | hf.config_json(config)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        loaded = transformers.AutoConfig.from_pretrained(tmp_path)
        assert loaded.model_type == hf.model_type
        loaded.save_pretrained(tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert "rope_parameters" in saved
        unsaid = {key: getattr(config, key) for key in UNSAID & config.__dataclass_fields__.keys()}
        assert replace(hf.config_from_json(saved), **unsaid) == config
        assert unknown_fields(fields, saved) == []
    assert warnings == []
    transformers.LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5})
    assert warnings != [], "the handler receives no warnings"
