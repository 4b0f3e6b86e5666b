"""Generation on a CUDA device."""

import pytest
import torch

from tests.unit.generation.tiny import PROMPTS, tiny
from titanlite.generation.generate import Sampling, generate
from titanlite.generation.kv_cache import remembering

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 40, 0.95, seed=11)])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_tokens_match_the_cpu(sampling: Sampling, n_kv_heads: int) -> None:
    """In float64: greedy and sampled, with padded prompts and a single prompt."""
    texts = []
    for device in ("cpu", "cuda"):
        model = tiny(n_kv_heads=n_kv_heads).to(device)
        for prompts in (PROMPTS, PROMPTS[:1]):
            texts.append(list(generate(model, prompts, sampling, max_new_tokens=30, eos_ids=())))
    assert texts[:2] == texts[2:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [[0, 0], [0, 5]])
def test_logits_match_a_full_forward_pass(dtype: torch.dtype, padding: list[int]) -> None:
    """Head dimension 16 and several query heads per key head, which fused kernels support."""
    model = tiny(dtype, dim=64).to("cuda")
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(3)).cuda()
    with remembering(model, padding, 40) as reading:
        found = torch.cat([reading.read(part) for part in tokens.split([20, *[1] * 20], dim=1)], dim=1).double()
    exact = tiny(torch.float64, dim=64).to(dtype).double().to("cuda")
    exact.init_buffers(torch.device("cuda"))
    for row, missing in enumerate(padding):
        with torch.no_grad():
            expected = exact(tokens[row : row + 1, missing:])[0]
        error = (found[row, missing:] - expected).norm() / expected.norm()
        assert error <= (1e-4 if dtype == torch.float32 else 0.05), (row, float(error))
