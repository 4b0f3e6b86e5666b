"""Mixture of experts against plain formulas: choice, ties, weights, the balance loss and its gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from titanlite.models.experts import (
    Experts,
    MixtureOfExperts,
    Placement,
    Router,
    balance,
    clamped_swiglu,
    count_choices,
    end_step,
    feed_forward,
    grouped_feed_forward,
    swiglu,
)
from titanlite.models.qwen3_moe import QWEN3_MOE

DIM, HIDDEN, N_EXPERTS, N_ACTIVE = 6, 10, 5, 2
SMALL = replace(
    QWEN3_MOE.flavors["debug"],
    dim=DIM,
    ffn_dim=HIDDEN,
    n_experts=N_EXPERTS,
    n_active_experts=N_ACTIVE,
    balance_loss=0.0,
)


def mixture(
    balance_loss: float = 0.0, z_loss: float = 0.0, bias_rate: float = 0.0, *, bias: bool = False
) -> MixtureOfExperts:
    rates = {"balance_loss": balance_loss, "z_loss": z_loss, "bias_rate": bias_rate}
    model = MixtureOfExperts(replace(SMALL, **rates), bias=bias).double()
    model.experts.activation = clamped_swiglu if bias else swiglu
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model


def rows() -> Tensor:
    return torch.randn(3, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def plain(model: MixtureOfExperts, x: Tensor) -> Tensor:
    """All experts on all positions, weighted by 0 where they are not chosen."""
    b1, b2, b3 = (getattr(model.experts, f"w{number}_bias", 0.0) for number in (1, 2, 3))
    scores = x @ model.router.weight.T + (0.0 if model.router.bias is None else model.router.bias)
    probabilities = scores.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(N_ACTIVE).indices, 1.0)
    weights = chosen * probabilities
    weights = weights / weights.sum(-1, keepdim=True)
    gate = torch.einsum("btd,ehd->bteh", x, model.experts.w1) + b1
    up = torch.einsum("btd,ehd->bteh", x, model.experts.w3) + b3
    if model.router.bias is None:
        hidden = functional.silu(gate) * up
    else:
        assert min(gate.max(), up.max(), -up.min()) > 7.0
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    out = torch.einsum("bteh,edh->bted", hidden, model.experts.w2) + b2
    return torch.einsum("bted,bte->btd", out, weights)


def gradients(out: Tensor, model: MixtureOfExperts, x: Tensor) -> list[Tensor]:
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad(out, [x, *model.parameters()], upstream))


@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_those_of_plain_formulas(bias: bool) -> None:
    """With biases, also the activation of gpt-oss, of which some inputs are clamped."""
    model, x = mixture(bias=bias), rows()
    out, expected = model(x), plain(model, x)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    for found, right in zip(gradients(out, model, x), gradients(expected, model, x), strict=True):
        assert ((found - right).norm() / right.norm()).item() < 1e-13


def test_ties_go_to_the_experts_with_the_lowest_indexes() -> None:
    model = mixture()
    seen: list[Tensor] = []
    model.experts.register_forward_pre_hook(lambda _, args: seen.extend(args[1:]))
    with torch.no_grad():
        model.router.weight.zero_()
        model(rows())
    chosen, weights = seen
    assert chosen.unique().tolist() == [0, 1]
    assert torch.equal(weights, torch.full_like(weights, 0.5))


def test_an_expert_without_positions_has_a_gradient_of_zero() -> None:
    model, x = mixture(), rows()
    with torch.no_grad():
        model.router.weight.zero_()
    model(x).sum().backward()
    gradient = model.experts.w1.grad
    assert gradient is not None
    assert gradient[:2].abs().sum(dim=(1, 2)).min() > 0
    assert torch.equal(gradient[2:], torch.zeros_like(gradient[2:]))


def test_the_router_computes_in_float32_for_a_bfloat16_model() -> None:
    router = Router(DIM, N_EXPERTS).bfloat16()
    assert router(rows().bfloat16()).dtype == torch.float32
    experts = Experts(N_EXPERTS, DIM, HIDDEN).bfloat16()
    chosen = torch.zeros(3, 7, 1, dtype=torch.int64)
    assert experts(rows().bfloat16(), chosen, torch.ones(3, 7, 1)).dtype == torch.bfloat16


def test_grouped_products_are_those_of_a_loop() -> None:
    """In sizes that the kernels of GPUs accept; the third expert has no rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 16), (4, 32, 16), (4, 16, 32), (4, 32, 16), (4, 32), (4, 16), (4, 32))
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    rows, *matrices = inputs
    counts = torch.tensor([7, 12, 0, 5])
    upstream = torch.randn(24, 16, generator=generator)
    found, expected = (
        [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
        for out in (function(rows, counts, *matrices) for function in (grouped_feed_forward, feed_forward))
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-4)


def test_gradients_repeat_bit_for_bit_on_several_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    model = MixtureOfExperts(replace(SMALL, dim=64, ffn_dim=8, n_experts=8, n_active_experts=5))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(1, 4096, 64, generator=generator, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (torch.autograd.grad(model(x).square().sum(), x)[0] for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


def test_balance_loss_of_a_row() -> None:
    equal = torch.full((1, 6, 3), 1 / 3, dtype=torch.float64)
    in_turn = torch.arange(6).view(1, 6, 1) % 3
    counts = count_choices(in_turn, 3)
    assert counts.tolist() == [[2, 2, 2]]
    assert balance(equal, counts, 1, None).item() == pytest.approx(1.0)
    one = torch.zeros(1, 6, 3, dtype=torch.float64)
    one[..., 0] = 1.0
    assert balance(one, count_choices(torch.zeros_like(in_turn), 3), 1, None).item() == pytest.approx(3.0)


def test_backward_adds_the_gradients_of_the_router_losses_and_forward_does_not_change() -> None:
    with_loss, without, x = mixture(0.3, 0.05), mixture(), rows()
    with_loss.start_step(8, 8 * x.shape[1])
    assert torch.equal(with_loss(x), without(x))
    probabilities = (x @ without.router.weight.T).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(N_ACTIVE).indices, 1.0)
    shares = chosen.sum(1) / (N_ACTIVE * x.shape[1])
    loss = 0.3 / 8 * N_EXPERTS * (shares * probabilities.mean(1)).sum()
    loss = loss + 0.05 / 8 * (x @ without.router.weight.T).exp().sum(-1).log().square().mean(1).sum()
    of_loss = torch.autograd.grad(loss, [x, without.router.weight])
    found, base = gradients(with_loss(x), with_loss, x), gradients(without(x), without, x)
    for index, added in enumerate(of_loss):
        assert added.norm() > 1e-6 * base[index].norm()
        assert ((found[index] - (base[index] + added)).norm() / base[index].norm()).item() < 1e-14
    for one, other in zip(found[2:], base[2:], strict=True):
        assert torch.equal(one, other)


def test_without_gradients_there_is_no_balance_loss() -> None:
    model = mixture(0.3, 0.05)
    model.placement = Placement(row_group="not a group")  # type: ignore[arg-type]
    with torch.no_grad():
        model(rows())


# Biases and padding ---------------------------------------------------------------------------------------------------


def test_biases_decide_the_choice_and_not_the_weights() -> None:
    model, x = mixture(bias_rate=0.1), rows()
    assert model.bias is not None
    plain_mixture = mixture()
    assert torch.equal(model(x), plain_mixture(x))
    model.bias[3] = 1.0  # more than any difference of probabilities
    seen: list[Tensor] = []
    model.experts.register_forward_pre_hook(lambda _, args: seen.extend(args[1:]))
    model(x)
    chosen, weights = seen
    assert (chosen[..., 0] == 3).all()
    probabilities = (x @ model.router.weight.T).softmax(-1).gather(-1, chosen)
    assert torch.equal(weights, probabilities / probabilities.sum(-1, keepdim=True))


def test_a_step_moves_biases_toward_equal_loads() -> None:
    model = mixture(bias_rate=0.25)
    assert model.bias is not None
    model.step_load = torch.tensor([10, 2, 6, 6, 6])
    end_step([model], torch.tensor(True), None)
    assert model.bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.0]
    assert model.step_load is None
    model.step_load = torch.tensor([10, 2, 7, 6, 5])
    end_step([model], torch.tensor(False), None)
    assert model.bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.0]  # a skipped step changes nothing
    assert model.load is not None
    assert model.load.tolist() == [20, 4, 13, 12, 11]
    end_step([model], torch.tensor(True), None)  # a step without a backward pass
    assert model.load.tolist() == [20, 4, 13, 12, 11]


def test_padding_counts_neither_in_loads_nor_in_losses() -> None:
    """A row with padding has the router's losses, and so the gradients, of the row without it."""
    model, x = mixture(0.3, 0.05), rows().detach()
    model.start_step(2, 9)
    short = x[:1, :4].clone().requires_grad_()
    short_gradients = gradients(model(short), model, short)
    load, (sums,) = model.step_load, model.step_sums
    assert load is not None
    model.start_step(2, 9)
    padded = torch.cat((x[:2], x[:2]), dim=1)  # row 1 has no token
    padded[0, :4] = short[0].detach()
    padded.requires_grad_()
    is_token = torch.zeros(padded.shape[:2], dtype=torch.bool)
    is_token[0, :4] = True
    out = model(padded, is_token)
    upstream = torch.zeros_like(out)
    upstream[0, :4] = torch.randn(short.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))[0]
    found = torch.autograd.grad(out, [padded, *model.parameters()], upstream)
    assert torch.equal(model.step_load, load)
    assert torch.allclose(model.step_sums[0], sums, rtol=1e-14, atol=0)
    assert found[0][0, 4:].abs().max() == found[0][1].abs().max() == 0
    for one, other in zip((found[0][0, :4], *found[1:]), (short_gradients[0][0], *short_gradients[1:]), strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-14
