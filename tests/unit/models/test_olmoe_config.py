"""The olmoe family: unsupported fields of config.json, and rules of its hyper-parameters."""

from dataclasses import replace
from typing import Any

import pytest

from titanlite.models.olmoe import FLAVORS, OLMOE
from titanlite.runtime.errors import UserError

FIELDS = OLMOE.hugging_face.config_json(FLAVORS["1B-7B"])


def test_the_number_of_experts_has_another_name_in_transformers_5() -> None:
    fields: dict[str, Any] = FIELDS | {"num_local_experts": 32}
    del fields["num_experts"]
    assert OLMOE.hugging_face.config_from_json(fields) == replace(FLAVORS["1B-7B"], n_experts=32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"head_dim": 64}, "head_dim = 64: this family supports only 128"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn': this family supports only 'default'"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok = 65: at most model.n_experts = 64"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef = -1.0: a finite number, 0 or more"),
    ],
)
def test_other_fields_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        OLMOE.hugging_face.config_from_json(FIELDS | change)


def test_widths_and_experts_are_checked() -> None:
    config = FLAVORS["debug"]
    assert OLMOE.check(config, 1024, 2, 2) == []
    for change in ({"dim": 258}, {"n_active_experts": 9}, {"z_loss": -1.0}, {"bias_rate": 1.0}, {"rope_theta": 1.0}):
        (problem,) = OLMOE.check(replace(config, **change), 1024, 1, 1)  # type: ignore[arg-type]
        assert problem.key == f"model.{next(iter(change))}"
    (problem,) = OLMOE.check(replace(config, n_heads=4, n_kv_heads=1), 1024, 2, 1)
    assert problem.key == "model.n_kv_heads"
