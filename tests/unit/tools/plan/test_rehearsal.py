"""The plan against the real program of one of many ranks, on fake tensors."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from benchmarks.measuring import configuration
from benchmarks.rehearsal import CASES
from benchmarks.rehearsal import rehearsed as by_command
from titanlite.models.registry import FAMILIES
from titanlite.parallel import tensor
from titanlite.planning import estimate
from titanlite.tools.plan.rehearsal.rank import Rehearsal, rehearse

SMALL = (
    *("model.dim=64", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_dim=128"),
    *("model.vocab_size=32768", "model.max_seq_len=256", "training.seq_len=256", "training.local_batch_size=2"),
    "training.global_batch_size=16",
)
GEMMA3 = ("model.family=gemma3", "model.head_dim=16", "model.sliding_window=64", "parallelism.pp=2")
GPT_OSS = ("model.family=gpt_oss", "model.head_dim=16", "model.sliding_window=64", "model.n_experts=16")

DEEPSEEK_V3 = (
    *("model.family=deepseek_v3", "model.n_kv_heads=8", "model.n_experts=16", "model.q_lora_rank=24"),
    *("model.kv_lora_rank=16", "model.qk_nope_head_dim=12", "model.qk_rope_head_dim=4", "model.v_head_dim=8"),
    *("model.dense_ffn_dim=256", "model.bias_rate=0.001"),
)
QWEN3_5 = (
    *("model.family=qwen3_5", "model.head_dim=16", "model.linear_key_heads=8", "model.linear_value_heads=16"),
    *("model.linear_key_dim=8", "model.linear_value_dim=8"),
)


def rehearsed(*settings: str, ranks: int = 8, rank: int = 0) -> Rehearsal:
    return rehearse(configuration([*SMALL, *settings], ranks, "cuda"), ranks, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        (0, ("parallelism.gradient_sync=last", "parallelism.tp=2", "parallelism.dp_replicate=2", "model.n_layers=2")),
        (4, ("parallelism.pp=2", "parallelism.tp=2", "optimizer.name=Muon", "model.tie_embeddings=true")),
        (
            0,
            (
                *("model.family=qwen3_moe", "model.n_experts=8", "model.n_active_experts=2", "parallelism.ep=4"),
                *("parallelism.cp=2", "activation_checkpoint.mode=selective", "model.bias_rate=0.001"),
                "model.n_layers=2",
            ),
        ),
        (0, (*DEEPSEEK_V3, "parallelism.ep=2", "parallelism.tp=2", "training.local_batch_size=4", "model.n_layers=2")),
        *(
            pytest.param(0, settings, marks=pytest.mark.soak)
            for settings in (
                (*GEMMA3, "parallelism.pp_schedule=Interleaved1F1B"),  # peak: the gradient of the embedding
                ("model.tie_embeddings=true", "training.global_batch_size=32", "activation_checkpoint.mode=full"),
                (*GPT_OSS, "parallelism.ep=2", "parallelism.tp=2"),
                (*QWEN3_5, "parallelism.cp=2", "parallelism.tp=2"),
                ("training.bit_equal=true", "parallelism.dp_replicate=2", "parallelism.tp=2"),
                ("float8.recipe=rowwise",),
            )
        ),
    ],
)
def test_plan_equals_a_rank_of_a_small_model(rank: int, settings: tuple[str, ...]) -> None:
    found = rehearsed(*settings, rank=rank)
    assert found.differences == []
    assert set(found.host_reads) <= {"parallel/expert.py"}
    assert found.mixed == {}
    assert 0.8 <= found.ratio <= 1.05


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rehearsed(family: str) -> None:
    sizes = ("training.global_batch_size=8", "training.local_batch_size=1", "training.seq_len=64")
    settings = (*sizes, f"model.family={family}", "model.flavor=debug", "model.n_layers=4")
    found = rehearse(configuration(settings, 4, "cuda"), 4, 0)
    assert (found.differences, found.mixed) == ([], {})


@pytest.mark.slow
def test_finds_a_collective_that_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = tensor._gather_sequence

    def twice(*args: Any) -> Tensor:
        gather(*args)
        return gather(*args)

    monkeypatch.setattr(tensor, "_gather_sequence", twice)
    (difference,) = rehearsed("parallelism.tp=2", "model.n_layers=1").differences
    assert difference.startswith("tp all-gather: ")


@pytest.mark.slow
def test_finds_a_plan_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = estimate._activation_bytes
    monkeypatch.setattr(estimate, "_activation_bytes", lambda *args: replace(real(*args), loss=0))
    assert rehearsed().ratio > 1.05


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "rank"), [(name, rank) for name, (_, _, chosen, _) in CASES.items() for rank in chosen]
)
def test_plan_equals_a_rank_of_a_published_size(name: str, rank: int) -> None:
    answer = by_command(name, rank)
    assert answer["problems"] == []
    found = answer["stages"]["1"][str(rank)]
    assert 0.8 <= found["peak_bytes"] / found["planned_peak_bytes"] <= 1.05
