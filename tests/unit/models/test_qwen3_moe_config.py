"""The qwen3_moe family: published config.json, unsupported fields, and rules of its hyper-parameters."""

from dataclasses import replace
from typing import Any

import pytest

from titanlite.models.qwen3_moe import FLAVORS, QWEN3_MOE
from titanlite.runtime.errors import UserError

PUBLISHED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
"""Fields of Qwen3-30B-A3B."""


def test_published_fields_are_read_and_written() -> None:
    config = QWEN3_MOE.hugging_face.config_from_json(PUBLISHED)
    assert config == FLAVORS["30B-A3B"]
    written = QWEN3_MOE.hugging_face.config_json(config)
    assert {name: value for name, value in written.items() if PUBLISHED.get(name, value) != value} == {}
    assert FLAVORS["235B-A22B"].ffn_dim * FLAVORS["235B-A22B"].n_active_experts == 12_288


def test_transformers_5_writes_another_name() -> None:
    fields: dict[str, Any] = PUBLISHED | {"num_local_experts": 64}
    del fields["num_experts"]
    assert QWEN3_MOE.hugging_face.config_from_json(fields).n_experts == 64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = "),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129: at most model.n_experts = 128"),
        ({"output_router_logits": True}, "a balance loss over all positions of a microbatch"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef = -1.0: a finite number, 0 or more"),
    ],
)
def test_other_fields_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        QWEN3_MOE.hugging_face.config_from_json(PUBLISHED | change)


def test_active_experts_and_sizes_are_checked() -> None:
    config = FLAVORS["debug"]
    assert QWEN3_MOE.check(config, 1024, 2, 2) == []
    for change in ({"n_active_experts": 9}, {"n_active_experts": 0}, {"n_experts": 0}, {"balance_loss": float("inf")}):
        problems = QWEN3_MOE.check(replace(config, **change), 1024, 1, 1)  # type: ignore[arg-type]
        assert next(iter(change)) in problems[0].key or "n_active" in problems[0].key, problems
    (problem,) = QWEN3_MOE.check(replace(config, ffn_dim=255), 1024, 2, 1)
    assert problem.key == "model.ffn_dim"
