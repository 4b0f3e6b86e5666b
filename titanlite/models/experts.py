"""Mixture of experts: each position is processed by a few of many feed-forward layers, chosen by a router.

The choice does not depend on the layout: ties go to the expert with the lowest index, no position is dropped, and the
results of the experts of a position are added up in the order of their choice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from titanlite.models.family import DecoderConfig
from titanlite.models.linear import gated
from titanlite.models.parts import BIAS, HIDDEN, SCORES, WRITING, WRITING_BIAS, Roles
from titanlite.models.watch import summed_parts, watch
from titanlite.runtime.torch_internals import is_in_backward, local_part


class Router(nn.Linear):
    """The score of each expert: weight x + bias, in promote_types(x.dtype, float32)."""

    roles: ClassVar[Roles] = {"weight": SCORES, "bias": BIAS}

    def __init__(self, dim: int, n_experts: int, *, bias: bool = False) -> None:
        super().__init__(dim, n_experts, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns (batch, seq_len, n_experts)."""
        return router_scores(x, self.weight, self.bias)


def router_scores(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


Activation = Callable[[Tensor, Tensor], Tensor]
"""Of the outputs of w1 and of w3: the input of w2."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gated(functional.silu, gate, up)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up from -7 to 7 (OpenAI, "gpt-oss-120b & gpt-oss-20b
    Model Card", 2025, and the code published with the weights)."""
    return functional.silu(1.702 * gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1.0) / 1.702


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""functional.linear, or one in another precision."""
Products = tuple[Product, Product]
"""That of w1 and w3, and that of w2."""


class ExpertsFunction(Protocol):
    """The output of each row's expert. rows: (rows, dim), sorted by expert; counts: of rows, int64 (n_experts,);
    weights: see Experts.weights."""

    def __call__(self, rows: Tensor, counts: Tensor, *weights: Tensor, activation: Activation) -> Tensor: ...


class Experts(nn.Module):
    """Gated layers, stacked: w2[e] activation(w1[e] x, w3[e] x) for expert e, by default SwiGLU.

    bias: whether they have w1_bias, w2_bias and w3_bias, (n_experts, outputs).
    feed_forward: computes them. Expert parallelism replaces it by one that exchanges rows between ranks.
    """

    roles: ClassVar[Roles] = {
        "w1": HIDDEN,
        "w2": WRITING,
        "w3": HIDDEN,
        "w1_bias": BIAS,
        "w2_bias": WRITING_BIAS,
        "w3_bias": BIAS,
    }

    def __init__(
        self, n_experts: int, dim: int, hidden_dim: int, *, bias: bool = False, activation: Activation = swiglu
    ) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.activation = activation
        self.feed_forward: ExpertsFunction = feed_forward
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        for name, outputs in {"w1_bias": hidden_dim, "w2_bias": dim, "w3_bias": hidden_dim}.items() if bias else ():
            self.register_parameter(name, nn.Parameter(torch.empty(n_experts, outputs)))

    def weights(self) -> dict[str, Tensor]:
        """w1, w2, w3, and their biases if there are any. Attributes may be casts to the compute dtype."""
        return {name: getattr(self, name) for name, _ in self.named_parameters(recurse=False)}

    def reads_counts(self, device_type: str, dtype: torch.dtype) -> bool:
        """Whether the host waits for numbers of rows in `forward`, so that it is not one graph for the compiler."""
        is_plain = self.feed_forward is feed_forward
        return not (is_plain and multiplies_groups(device_type, dtype, *local_part(self.w1).shape[1:]))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """Weighted sum of the chosen experts of each position.

        x: (batch, seq_len, dim); chosen: int64 (batch, seq_len, n_active), the experts of each position; weights: their
        weights, of the same shape, in promote_types(x.dtype, float32); shared: the results of shared experts, which are
        added. Returns the shape and dtype of x.
        """
        out = self.weighted(x, chosen, weights, *self.weights().values())
        return out if shared is None else out + shared

    def weighted(self, x: Tensor, chosen: Tensor, weights: Tensor, *own: Tensor) -> Tensor:
        """`forward` with these weights of the experts; with a part of the hidden features, a part of a sum."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)  # by expert, then by position
        inverse = inverse_permutation(order)
        counts = torch.zeros(self.n_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts))
        rows: Tensor = _ByExpert.apply(x.flatten(0, -2), order, inverse)  # type: ignore[no-untyped-call]
        results = self.feed_forward(rows, counts, *own, activation=self.activation)
        results = permuted(results, inverse, order).view(*chosen.shape, -1)
        return (results.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=-2).to(x.dtype)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order`, int64 (n,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _ByExpert(torch.autograd.Function):
    """The input of each choice: (positions, dim) -> (choices, dim), by expert. The gradients of the choices of a
    position are added up in their order; torch's own gradient of an index adds them up as threads arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.n_active = len(order) // len(x)
        return x[order // ctx.n_active]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (-1, ctx.n_active)).sum(dim=1), None, None


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order] of the rows of x; inverse: of `order`, which its gradient uses."""
    result: Tensor = _Permuted.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


def feed_forward(
    rows: Tensor, counts: Tensor, *weights: Tensor, activation: Activation = swiglu, products: Products | None = None
) -> Tensor:
    """The ExpertsFunction of experts that are all on this rank. products: None: plain ones.

    With plain ones in bfloat16 on CUDA the host does not read the counts, if dim and hidden_dim (per tp rank) are
    multiples of 8, as grouped matrix products need.
    """
    is_grouped = products is None and multiplies_groups(rows.device.type, rows.dtype, *weights[0].shape[1:])
    if is_grouped and len(rows):
        return grouped_feed_forward(rows, counts, *weights, activation=activation)
    parts = rows.split(counts.tolist())
    experts = zip(parts, *(weight.unbind() for weight in weights), strict=True)
    # not `linear`, which is for few numbers of rows
    products = products or (functional.linear, functional.linear)
    return torch.cat([_gated(products, activation, *expert) for expert in experts])


def multiplies_groups(device_type: str, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether `feed_forward` uses grouped products there. sizes: dim and hidden_dim of a rank."""
    return device_type == "cuda" and dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def grouped_feed_forward(rows: Tensor, counts: Tensor, *weights: Tensor, activation: Activation = swiglu) -> Tensor:
    """`feed_forward` by torch's grouped matrix products."""
    offsets = counts.cumsum(0, dtype=torch.int32)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = functional.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
        return out if bias is None else out + bias.repeat_interleave(counts, dim=0, output_size=len(x))

    return _gated((product, product), activation, rows, *weights)


def _gated(products: Products, activation: Activation, x: Tensor, *weights: Tensor) -> Tensor:
    (w1, w2, w3), (b1, b2, b3) = weights[:3], weights[3:] or (None, None, None)
    inner, outer = products
    return outer(activation(inner(x, w1, b1), inner(x, w3, b3)), w2, b2)


@dataclass(frozen=True)
class Placement:
    """Place of a mixture in the full model and on the mesh.

    block: index of the block in the full model. own_share: share of this rank in the losses of its positions; 0 if
    another rank has the same ones. row_group: the ranks that hold the other positions of the same rows, if there are
    any.
    """

    block: int = 0
    own_share: float = 1.0
    row_group: dist.ProcessGroup | None = None


class MixtureOfExperts(nn.Module):
    """Feed-forward layer of n_experts experts, of which each position uses the n_active_experts most probable.

    The probabilities are the softmax of the router's scores, or their sigmoid if config.scoring is that. The weights of
    the chosen experts are their probabilities, divided by their sum if `normalize` (of a softmax, the softmax of their
    scores alone), times route_scale. With n_groups, the experts are chosen from the n_active_groups groups whose two
    most probable experts have the largest sum (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2).
    shared: a layer whose result each position also has. bias: whether router and experts have biases. config: its
    balance_loss and z_loss are coefficients of these losses, whose gradients each backward pass adds. bias_rate: if
    above 0, experts are chosen by probability plus the buffer `bias`, float32 (n_experts,), which `end_step` moves by
    this rate toward equal loads (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
    2024); the weights do not contain it.

    placement: parallelism replaces it. num_rows, num_tokens: see start_step.
    step_load: positions of this rank that chose each expert, int64 (n_experts,), in the forward passes of this step;
    step_sums: those of ROUTER_SUMS, of each pass. load: of all steps since it was None; router_sums: the parts of those
    of ROUTER_SUMS since it was None, see parts_of.
    """

    bias: Tensor | None
    watch = staticmethod(watch)
    gathers = True

    def __init__(
        self, config: DecoderConfig, *, normalize: bool = True, bias: bool = False, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.n_active = config.n_active_experts
        self.normalize = normalize
        self.balance_loss = config.balance_loss
        self.z_loss = config.z_loss
        self.bias_rate = config.bias_rate
        self.placement = Placement()
        self.num_rows: Tensor | int = 1
        self.num_tokens: Tensor | int = 1
        self.step_load: Tensor | None = None
        self.step_sums: list[Tensor] = []
        self.number: Tensor | None = None
        self.load: Tensor | None = None
        self.router_sums: Tensor | None = None
        self.router = Router(config.dim, config.n_experts, bias=bias)
        activation = clamped_swiglu if config.clamped else swiglu
        self.experts = Experts(config.n_experts, config.dim, config.ffn_dim, bias=bias, activation=activation)
        self.shared = shared
        self.scoring = config.scoring
        self.route_scale = config.route_scale
        self.n_groups, self.n_active_groups = config.n_groups, config.n_active_groups
        has_bias = config.bias_rate > 0 or config.always_biased
        self.register_buffer("bias", torch.zeros(config.n_experts) if has_bias else None)

    def init_buffers(self, device: torch.device) -> None:
        if self.bias is not None:
            self.bias = torch.zeros(self.bias.shape, dtype=torch.float32, device=device)

    def start_step(self, num_rows: Tensor | int, num_tokens: Tensor | int) -> None:
        """Set the denominators of the router's losses, at least 1: rows and tokens of the global batch. What forward
        passes have noted since the last step is dropped."""
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.step_load, self.step_sums = None, []

    def take_totals(self) -> tuple[Tensor, Tensor] | None:
        """(load, router_sums) since the last call; None without a step."""
        load, sums = self.load, self.router_sums
        self.load = self.router_sums = None
        return None if load is None or sums is None else (load, sums)

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """x: (batch, seq_len, dim). is_token: bool (batch, seq_len), whether a position holds a token of a document:
        the others count neither in loads nor in losses. None: all do. Returns the shape of x."""
        scores: Tensor = self.router(x)
        probabilities = scores.softmax(dim=-1) if self.scoring == "softmax" else scores.sigmoid()
        chosen = self.choose(probabilities.detach())
        weights = probabilities.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.route_scale != 1:
            weights = weights * self.route_scale
        if self.scoring == "sigmoid":  # in the losses of the router, they add up to 1
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        if torch.is_grad_enabled():
            counts = count_choices(chosen, scores.shape[-1], is_token)
            loss, sums = self._losses(scores, probabilities, counts, is_token)
            weights = _InBackward.apply(weights, loss)  # type: ignore[no-untyped-call]
            self._note_once(counts.sum(dim=0), sums)
        shared = () if self.shared is None else (self.shared(x),)
        out: Tensor = self.experts(x, chosen, weights, *shared)
        return out

    def choose(self, probabilities: Tensor) -> Tensor:
        """The experts of each position, int64 (batch, seq_len, n_active), the most probable one first."""
        ranking = probabilities if self.bias is None else probabilities + self.bias
        if self.n_active_groups < self.n_groups:
            groups = ranking.unflatten(-1, (self.n_groups, -1))
            sums = groups.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(dim=-1)
            best = sums.sort(dim=-1, descending=True, stable=True).indices[..., : self.n_active_groups]
            is_best = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, value=True)
            ranking = groups.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(-2)
        # a copy, as a view would keep the indices of all experts
        return ranking.sort(dim=-1, descending=True, stable=True).indices[..., : self.n_active].clone()

    def _losses(
        self, scores: Tensor, probabilities: Tensor, counts: Tensor, is_token: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's share of the router's losses of the global batch, and its part of the sums of ROUTER_SUMS."""

        def held(values: Tensor) -> Tensor:
            return values if is_token is None else values.where(is_token, 0.0)

        if is_token is not None:
            probabilities = probabilities.where(is_token.unsqueeze(-1), 0.0)
        row_group = self.placement.row_group
        of_rows = balance(probabilities, counts, self.n_active, row_group).sum()
        logsumexp = scores.logsumexp(dim=-1)
        squares = held(logsumexp.square()).sum()
        loss = self.balance_loss * of_rows / self.num_rows + self.z_loss * squares / self.num_tokens
        with torch.no_grad():
            if self.scoring == "sigmoid":
                entropy = torch.special.entr(probabilities).sum()
            else:
                entropy = (held(logsumexp) - (probabilities * scores).sum(dim=-1)).sum()
            num_rows = (counts.sum(dim=1) > 0).sum()
            counts_rows = row_group is None or row_group.rank() == 0
            sums = torch.stack((of_rows * counts_rows, num_rows * counts_rows, squares, entropy)).to(torch.float64)
        return loss * self.placement.own_share, sums

    def _note_once(self, counts: Tensor, sums: Tensor) -> None:
        """Add those of a forward pass with gradients: once, even if it is computed again."""
        if torch.compiler.is_compiling():
            assert self.number is not None, "compiled without prepare_compilation"
            _note_routing(self.number, counts, sums)
        elif not is_in_backward():
            self.note(counts, sums)

    def note(self, counts: Tensor, sums: Tensor) -> None:
        self.step_load = counts if self.step_load is None else self.step_load + counts
        self.step_sums.append(sums)

    def prepare_compilation(self) -> None:
        """Call before the compiler sees `forward`; not to be copied after that."""
        number = next(_NUMBERS)
        self.number, _COMPILED[number] = torch.tensor(number, device="cpu"), self


_NUMBERS = count()
_COMPILED: WeakValueDictionary[int, MixtureOfExperts] = WeakValueDictionary()
"""Mixtures of compiled blocks by their `number`. A tensor of the host, since the compiler would build a graph for each
number."""


@torch.library.custom_op("titanlite::note_routing", mutates_args=("number",))
def _note_routing(number: Tensor, counts: Tensor, sums: Tensor) -> None:
    """An operation, so that compiled blocks call it when they run. They drop operations that write nothing, and use the
    memory of its arguments again."""
    if not is_in_backward():
        _COMPILED[int(number)].note(counts.clone(), sums.clone())


ROUTER_SUMS = ("balance_loss", "rows", "z_loss", "router_entropy")
"""Sums of a mixture: the balance losses of rows and the number of these rows, the squares of the z-loss of positions,
and the entropies of the probabilities of positions, in nats."""


def mixtures_of(model_parts: Iterable[nn.Module]) -> list[MixtureOfExperts]:
    return [module for part in model_parts for module in part.modules() if isinstance(module, MixtureOfExperts)]


@torch.no_grad()
def end_step(mixtures: Sequence[MixtureOfExperts], ok: Tensor, group: dist.ProcessGroup | None) -> None:
    """Move the biases by the loads of the step, and add these to the mixtures' `load`.

    ok: bool scalar, whether the step updates the weights; otherwise the biases stay, too. group: the ranks that hold
    the other positions of the global batch; None: this rank has all. One all-reduce of integers for all biases, so that
    the sign of each change does not depend on the layout.
    """
    biased = [mixture for mixture in mixtures if mixture.bias_rate > 0 and mixture.step_load is not None]
    if biased:
        loads = torch.stack([mixture.step_load for mixture in biased if mixture.step_load is not None])
        if group is not None:
            dist.all_reduce(loads, group=group)
        below = torch.sign(loads.sum(dim=1, keepdim=True) - loads * loads.shape[1])  # of the mean
        for mixture, direction in zip(biased, below, strict=True):
            assert mixture.bias is not None
            mixture.bias += mixture.bias_rate * direction * ok
    for mixture in mixtures:
        if mixture.step_load is not None:
            mixture.load = mixture.step_load if mixture.load is None else mixture.load + mixture.step_load
            mixture.step_load = None
    noted = [mixture for mixture in mixtures if mixture.step_sums]
    for mixture, sums in zip(noted, summed_parts([each.step_sums for each in noted]), strict=True):
        mixture.router_sums = sums if mixture.router_sums is None else mixture.router_sums + sums
        mixture.step_sums = []


def count_choices(chosen: Tensor, n_experts: int, is_token: Tensor | None = None) -> Tensor:
    """How many positions of each row chose each expert: int64 (batch, n_experts). is_token: those that count."""
    counts = torch.zeros(len(chosen), n_experts, dtype=torch.int64, device=chosen.device)
    once = torch.ones_like(chosen) if is_token is None else is_token.to(torch.int64).unsqueeze(-1).expand_as(chosen)
    return counts.scatter_add(1, chosen.flatten(1), once.flatten(1))


def balance(probabilities: Tensor, counts: Tensor, n_active: int, row_group: dist.ProcessGroup | None) -> Tensor:
    """Balance loss of each row, (batch,): the sum over the experts of f P, where P is the mean probability of an expert
    in the row, and f its share of the row's choices times the number of experts; 1 if all are equal, 0 for a row
    without tokens.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), equations 17 to 20, with probabilities that add up to 1.
    probabilities: (batch, seq_len, n_experts), 0 at positions that do not count; counts: of choices, (batch,
    n_experts). row_group: an all-reduce over it adds the other positions of the rows; the gradient is that of the own
    ones, and all ranks' add up to the loss's.
    """
    mass = probabilities.sum(dim=1)
    counts = counts.to(mass.dtype)
    if row_group is not None:
        both = torch.stack((counts, mass.detach()))
        dist.all_reduce(both, group=row_group)
        counts, mass = both[0], mass + (both[1] - mass.detach())
    choices = counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return (counts / choices * mass / choices).sum(dim=-1) * (n_active * counts.shape[-1])


class _InBackward(torch.autograd.Function):
    """The identity of x. Each backward pass also differentiates `loss`, a scalar, with weight 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return gradient, one
