"""Forms of config.json: logits of a folder as titanlite reads it, compared with those of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.hf.making import write_model
from titanlite.hf.folder import open_folder
from titanlite.models.family import saved_tensors

FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
NARROW = {"head_dim": 8, "n_heads": 4, "dim": 32}
WINDOWS = {"sliding_window": 7, "full_interval": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
USUAL = 0.1 * math.log(4) + 1


def kinds(*thetas: Any) -> dict[str, Any]:
    """rope_parameters by kind of layer, with these bases; ...: without the field."""
    names = ("full_attention", "sliding_attention")
    bases = [{} if theta is ... else {"rope_theta": theta} for theta in (*thetas, ...)[:2]]
    return {name: {"rope_type": "default"} | base for name, base in zip(names, bases, strict=True)}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral, full attention only": ("mistral", {"layer_types": FULL}, {"sliding_window": 7}),
    "mistral, windows only": ("mistral", {"layer_types": SLIDING}, {"sliding_window": 7}),
    "mistral, no kinds": ("mistral", {"layer_types": None}, {"sliding_window": 7}),
    "mistral, head_dim absent": ("mistral", {"head_dim": ...}, NARROW),
    "qwen3_moe, head_dim absent": ("qwen3_moe", {"head_dim": ...}, NARROW),
    "qwen2, no layer with the window": ("qwen2", WINDOW | {"layer_types": FULL, "attention_bias": True}, {}),
    "qwen3, too few layers for the window": ("qwen3", WINDOW | {"max_window_layers": 2}, {}),
    "qwen3_moe, no window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}, {}),
    "smollm3, no layer with the window": ("smollm3", WINDOW | {"layer_types": FULL}, {"no_rope_interval": 2}),
    "qwen3, usual factor": ("qwen3", {"rope_scaling": YARN | {"attention_factor": USUAL}}, {}),
    "gpt_oss, usual factor": (
        "gpt_oss",
        {"rope_scaling": YARN | {"attention_factor": USUAL, "truncate": False}},
        {"sliding_window": 7},
    ),
    "deepseek_v3, usual factor": (
        "deepseek_v3",
        {"rope_scaling": YARN | {"attention_factor": 1, "mscale": 0.7, "mscale_all_dim": 0.7}},
        {},
    ),
    "llama3, factor that is not read": (
        "llama3",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "attention_factor": 1.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {},
    ),
    "gemma3, flat keys beside kinds": (
        "gemma3",
        {"rope_parameters": kinds(5e4, 2e3) | {"rope_theta": 7.0, "rope_type": "linear"}, "hidden_act": "gelu"},
        WINDOWS,
    ),
    "gemma3, bases outside of kinds": (
        "gemma3",
        {"rope_parameters": kinds(...), "rope_theta": 5e4, "rope_local_base_freq": 2e3},
        WINDOWS,
    ),
    "olmo3, base outside for full attention": (
        "olmo3",
        {"rope_parameters": kinds(..., 2e4), "rope_theta": 2e4},
        WINDOWS,
    ),
    "olmo3, kinds and scaling": (
        "olmo3",
        {"rope_parameters": kinds(2e4, 2e4), "rope_scaling": YARN, "rope_theta": 2e4},
        WINDOWS,
    ),
    "smollm3, tied by default": ("smollm3", {"tie_word_embeddings": ...}, {"tie_embeddings": True}),
    "olmo3, windows only": ("olmo3", {"layer_types": SLIDING}, WINDOWS),
}
"""By name: family, changes of the fields that titanlite writes (...: without the field), changes of a tiny model."""


def write(folder: Path, family: str, changes: dict[str, Any], **model: Any) -> None:
    """Write a folder with weights in float64, and with `changes` of config.json."""
    write_model(folder, family, **model)
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def tokens() -> Tensor:
    return torch.randint(131, (2, 64), generator=torch.Generator().manual_seed(1))


def logits(folder: Path) -> Tensor:
    """Of the model that titanlite reads."""
    found = open_folder("folder", folder)
    model = found.family.build(found.hyper_parameters).to(torch.float64)
    model.init_buffers(torch.device("cpu"))
    model.tie_weights()
    with torch.no_grad():
        found.fill_(saved_tensors(model))
        read: Tensor = model(tokens())
    return read


def transformers_logits(folder: Path) -> Tensor:
    import transformers  # takes seconds, which test collection does not need

    eager = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    with torch.no_grad():
        read: Tensor = model.eval()(input_ids=tokens(), use_cache=False).logits
    return read


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """transformers computes norms, rotary tables and softmax in float32."""
    family, changes, model = CASES[case]
    write(tmp_path / "folder", family, changes, **model)
    expected = transformers_logits(tmp_path / "folder")
    assert (logits(tmp_path / "folder") - expected).norm() / expected.norm() < 1e-5
