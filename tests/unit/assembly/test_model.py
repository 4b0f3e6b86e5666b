"""The attention kernel in the start log."""

import pytest
import torch

from titanlite.assembly import model
from titanlite.assembly.model import describe_attention
from titanlite.config.load import load_config


@pytest.mark.parametrize(
    ("device_type", "settings", "expected"),
    [
        ("cpu", [], None),
        ("cuda", [], "bfloat16 32 8 128"),
        ("cuda", ["--parallelism.tp", "2"], "bfloat16 16 4 128"),
        ("cuda", ["--data.document_mask", "true"], "FlexAttention"),
        ("cuda", ["--data.document_mask", "true", "--training.dtype", "float64"], "float64 32 8 128"),
    ],
)
def test_the_kernel_for_this_rank(
    device_type: str, settings: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shape(_device: torch.device, dtype: torch.dtype, *heads: int) -> str:
        return " ".join(map(str, (str(dtype).removeprefix("torch."), *heads)))

    monkeypatch.setattr(model, "chosen_kernel", shape)
    config = load_config(["--model.flavor", "8B", *settings], world_size=2, device_type=device_type)
    assert describe_attention(config, torch.device(device_type)) == expected
