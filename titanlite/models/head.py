"""The output layer with its loss, computed in chunks of tokens: the logits of a batch never exist at once.

The products and their gradients are those of a linear layer followed by the loss. Only the number of logits that exist
at the same time differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.family import has_own
from titanlite.models.linear import is_by_onednn, product, weight_gradient
from titanlite.models.losses import CROSS_ENTROPY, FURTHER_TOKENS, LOSSES, TERMS, Loss, z_loss
from titanlite.models.parts import SCORES, Roles
from titanlite.models.watch import PARTS, parts_of, watch
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import setting
from titanlite.runtime.torch_internals import is_dtensor, is_needed_by_backward

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Largest logits of an automatic chunk."""
CHUNK_TOKENS = {"cpu": 256, "cuda": 4096}
"""Largest automatic chunk: caches of CPUs are faster with small ones (docs/LOG.md); products on GPUs, and the gradient
of the weight, which each chunk reads and writes, with large ones."""
ALIGNED_TOKENS = 128
"""Automatic chunks on GPUs are multiples of it if they can be: tiles of products are then full."""
PART_IDS = 4096
"""Ids whose gradients, in a narrower dtype than their sum, exist at the same time."""

Exponentials = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The function exponentials_, or its compiled form."""


@dataclass(frozen=True)
class LossConfig:
    """The loss and its computation."""

    name: str = CROSS_ENTROPY.name
    """The loss of a token: cross_entropy, or one that a plugin has registered (docs/models.md)."""
    chunk_tokens: int | Literal["auto"] = setting(
        "auto", 'set a positive number, or "auto"', least=1, unset="auto", affects="layout"
    )
    """Tokens whose logits exist at the same time. auto: on a GPU as many as take 1 GiB in the dtype of the loss, at
    least float32, at most 4,096, and in chunks of about equal size; on a CPU 128 MiB, and at most 256. With a narrower
    compute dtype, two copies in this dtype exist beside them."""

    z_loss: float = setting(
        -1.0, "0 for none; 1e-4 is usual", least=0, unset=-1, automatic="as the family's published models were trained"
    )
    """Coefficient of the z-loss, the mean over tokens of the squared logarithm of the sum of the exponentials of the
    logits, a term of the objective; 0: none. Not that of routers, model.z_loss. -1: that of the checkpoint to resume
    from; else, with the cross-entropy, 1e-5 for olmo2 and olmo3, as their published models were trained; else 0."""
    terms: tuple[str, ...] = ()
    """Further terms of the objective, that plugins have registered (docs/models.md)."""
    further_tokens_weight: float = setting(0.3, "0.3 and 0.1 are usual", above=0)
    """Factor of the mean loss of the token after the next one, a term of the objective, with model.n_further_tokens.
    """

    @property
    def chosen(self) -> Loss:
        """The loss with all its terms. The section must be valid."""
        loss, own = LOSSES[self.name], {"z_loss": z_loss(self.z_loss)} if self.z_loss > 0 else {}
        more = own | {name: TERMS[name] for name in self.terms}
        return replace(loss, terms={**loss.terms, **more}) if more else loss

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is in nats."""
        return LOSSES[self.name].is_cross_entropy


def check_terms(section: LossConfig) -> list[Problem]:
    """Check that no term is chosen twice. The name of the loss must be valid."""
    rules, own = Rules("loss", section), LOSSES[section.name].terms
    has_one = "z_loss" in {*own, *section.terms}
    is_free = FURTHER_TOKENS not in {*own, *section.terms}
    rules.require("terms", is_free, f"none of the name {FURTHER_TOKENS}, which is taken", "register it as another one")
    rule, remedy = "0 with another term of the name z_loss", "set one of them"
    rules.require("z_loss", not (section.z_loss > 0 and has_one), rule, remedy)
    twice = [name for name in section.terms if name in own or section.terms.count(name) > 1]
    of_loss = f', and none that loss.name = "{section.name}" has: {", ".join(own)}' if own else ""
    rules.require("terms", not twice, f"each term once{of_loss}", "remove it")
    return rules.problems


@dataclass(frozen=True)
class Scoring(ABC):
    """How the scores of tokens are computed: in chunks of `chunk` tokens, over one part of the vocabulary.

    start: the first id whose weights this rank has, of `size` ids in all. group: the ranks that have the other parts
    (mesh axis tp); None: this rank has all. gathers: whether each rank gathers the scores of all ids, instead of two
    numbers per token. soft_cap: see OutputLayer. transform: that of a subclass, in place of the soft cap; None: it has
    none. loss: with its terms. shares: of a token's values in each term, 1 / its denominator, (terms,). sums: the parts
    of this rank's share of each term, (PARTS, terms), see parts_of, added up in place. Both None: without terms.

    Subclasses compute the loss and its gradient from scores, (tokens, ids), which they may overwrite. A gradient of the
    scores comes with a factor of each token, (tokens, 1), to be applied to smaller tensors; None: 1. weights: of the
    losses in the objective, (tokens,).
    """

    chunk: int
    start: int
    size: int
    group: dist.ProcessGroup | None
    gathers: bool
    soft_cap: float
    transform: Callable[[Tensor], Tensor] | None
    loss: Loss
    shares: Tensor | None
    sums: Tensor | None

    @abstractmethod
    def losses_(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each token, 0 if it is not valid, and what `gradient_` needs of it, both (tokens,)."""

    @abstractmethod
    def losses_and_gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss of each token, and the gradient of the objective with its factor."""

    @abstractmethod
    def gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor, kept: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the objective with its factor. kept: from `losses_`. scales: of all that a token adds to the
        objective, (tokens,)."""

    def chunks(self, tokens: int) -> list[slice]:
        return [slice(begin, begin + self.chunk) for begin in range(0, tokens, self.chunk)]

    def buffer(self, x: Tensor, weight: Tensor) -> Tensor:
        """Memory of the logits of any chunk by torch's products: large new tensors cost page faults."""
        return x.new_empty(min(self.chunk, len(x)), len(weight))

    def scores(self, x: Tensor, weight: Tensor, buffer: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Logits of a chunk, (tokens, ids), in at least float32: of this rank's ids, or of all if it gathers them; and
        the function that takes the gradient of these to the one before `transform`."""
        scores = self._products(x, weight, buffer)
        if self.soft_cap and self.transform is None:
            tanh = scores.div_(self.soft_cap).tanh_()
            return tanh * self.soft_cap, lambda gradient: gradient.mul_(tanh.square_().neg_().add_(1.0))
        if self.transform is None:
            return scores, lambda gradient: gradient
        before = scores.detach().requires_grad_()
        with torch.enable_grad():
            after = self.transform(before)
        # a copy, since it is overwritten, and autograd may need it
        return after.detach().clone(), lambda gradient: torch.autograd.grad(after, before, gradient)[0]

    def _products(self, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        by_onednn = is_by_onednn(x, weight)
        scores = product(x, weight) if by_onednn else torch.mm(x, weight.T, out=buffer[: len(x)])
        scores = scores.to(torch.promote_types(x.dtype, torch.float32))
        if not self.gathers:
            return scores
        full = scores.new_zeros(len(scores), self.size)
        full[:, self.start : self.start + scores.shape[1]] = scores
        dist.all_reduce(full, group=self.group)  # sums with zeros; parts of different sizes cannot be gathered
        return full

    def note(self, term_values: Sequence[Tensor]) -> None:
        """Add the values of tokens to the sums of the terms."""
        if self.shares is not None and self.sums is not None:
            sums = torch.stack([each.detach().sum().to(torch.float64) for each in term_values])
            self.sums.add_(parts_of(sums * self.shares))

    def most_likely(self, scores: Tensor) -> Tensor:
        """The id with the largest score of each token, the first of several, (tokens,).

        Two all-reduces over the ranks that share the vocabulary, unless this rank has all scores.
        """
        top, ids = scores.max(1)
        if self.group is None or self.gathers:
            return ids
        largest = top.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        ids = torch.where(top == largest, ids + self.start, self.size)
        dist.all_reduce(ids, dist.ReduceOp.MIN, group=self.group)
        return ids


@dataclass(frozen=True)
class CrossEntropy(Scoring):
    """The cross-entropy in nats. exponentials: the function exponentials_, or its compiled form."""

    exponentials: Exponentials

    def losses_(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the logarithm of the sum of the exponentials."""
        losses, top, total = self.statistics_(scores, labels)
        logsumexp = top + total.log()
        if self.shares is not None:
            self.note(self.loss.term_values(logsumexp, labels))
        return losses, logsumexp

    def losses_and_gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        losses, top, total = self.statistics_(scores, labels)
        slopes = None
        if self.shares is not None:
            slopes, values = self._slopes(top + total.log(), labels, self.shares)
            self.note(values)
        return losses, *self._differences_(scores, labels, total, weights, slopes)

    def gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor, kept: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        exponentials = scores.sub_(kept.unsqueeze(1)).exp_()
        slopes = None if self.shares is None else self._slopes(kept, labels, self.shares)[0] * scales
        return self._differences_(exponentials, labels, torch.ones_like(kept), weights * scales, slopes)

    def _slopes(self, logsumexp: Tensor, labels: Tensor, shares: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient of the terms with respect to the logsumexp of each token, (tokens,), and the values of each."""
        leaf = logsumexp.detach().requires_grad_()
        with torch.enable_grad():
            values = self.loss.term_values(leaf, labels)
            objective = sum(((each * share).sum() for each, share in zip(values, shares, strict=True)), leaf.sum() * 0)
        (slopes,) = torch.autograd.grad(objective, leaf)
        return torch.where(labels >= 0, slopes, 0), values

    def statistics_(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the scores, (tokens, ids), by exp(scores - top). Returns loss, top and total, each (tokens,).

        top: the largest score over all ids. total: the sum of the exponentials over all ids. loss: 0 for tokens that
        are not valid. Two all-reduces over the ranks that share the vocabulary.
        """
        group = None if self.gathers else self.group
        top = scores.amax(1)
        if group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        sums = self.exponentials(scores, top, *self.own_ids(labels, scores))
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, own = sums.unbind()
        return torch.where(labels >= 0, total.log() - own, 0), top, total

    def own_ids(self, labels: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the labels in the scores, (tokens, 1), clamped, and whether they are there, (tokens,)."""
        ids = labels - (0 if self.gathers else self.start)
        last = scores.shape[1] - 1
        return ids.clamp(0, last).unsqueeze(1), (ids >= 0) & (ids <= last)

    def _differences_(
        self, exponentials: Tensor, labels: Tensor, total: Tensor, weights: Tensor, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient weights * (exponentials / total - one-hot labels), with weights / total as its factor.

        exponentials: see exponentials_; overwritten. slopes: of the terms, which add slopes * exponentials / total.
        """
        ids, is_own = self.own_ids(labels, exponentials)
        if slopes is not None:
            exponentials.mul_(((weights + slopes) / total).unsqueeze(1))
            return exponentials.scatter_add_(1, ids, torch.where(is_own, -weights, 0).unsqueeze(1)), None
        exponentials.scatter_add_(1, ids, torch.where(is_own, -total, 0).unsqueeze(1))
        return exponentials, (weights / total).unsqueeze(1)


@dataclass(frozen=True)
class RegisteredLoss(Scoring):
    """A loss by its function and terms, over the full vocabulary, which each rank of the group computes alike."""

    def losses_(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps nothing."""
        if self.shares is not None:
            self.note(self.loss.term_values(scores, labels))
        losses = self.loss.losses(scores, labels)
        return losses, torch.zeros_like(losses)

    def losses_and_gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        losses, gradient, terms = self._differentiated(scores, labels, weights, torch.ones_like(weights))
        self.note(terms)
        return losses, gradient, None

    def gradient_(
        self, scores: Tensor, labels: Tensor, weights: Tensor, kept: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        del kept
        return self._differentiated(scores, labels, weights * scales, scales)[1], None

    def _differentiated(
        self, scores: Tensor, labels: Tensor, weights: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The losses, the gradient of the objective, and the values of each term."""
        leaf = scores.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss.losses(leaf, labels)
            objective, terms = (losses * weights).sum(), []
            if self.shares is not None:
                terms = self.loss.term_values(leaf, labels)
                for share, values in zip(self.shares, terms, strict=True):
                    objective = objective + (values * (scales * share)).sum()
        (gradient,) = torch.autograd.grad(objective, leaf)
        # a function may give NaN for tokens that are not valid, and then their gradients are NaN, too
        return losses.detach(), gradient.contiguous().masked_fill_((labels < 0).unsqueeze(1), 0), terms


def exponentials_(scores: Tensor, top: Tensor, ids: Tensor, is_own: Tensor) -> Tensor:
    """Replace the scores, (tokens, ids), by exp(scores - top). Returns (2, tokens): their sum; the label's score - top.

    ids, is_own: see CrossEntropy.own_ids; 0 for a label that is not there.
    """
    own = torch.where(is_own, scores.gather(1, ids).squeeze(1) - top, 0)
    total = scores.sub_(top.unsqueeze(1)).exp_().sum(1)
    return torch.stack([total, own])


@dataclass(frozen=True)
class LossComputation:
    """How an output layer computes the loss on a layout.

    chunk_tokens: see LossConfig. recomputes: whether backward computes the logits again. Otherwise forward computes the
    gradients at once and keeps them, (vocab_size, dim) for the weight, per microbatch in flight: one product less (two
    with a split backward pass), and no more memory if only one microbatch is in flight and its backward pass is not
    split. gathers_logits, exponentials: see Scoring and CrossEntropy. further_weight: of the loss of further tokens; 0:
    there are none.
    """

    loss: Loss = CROSS_ENTROPY
    chunk_tokens: int | Literal["auto"] = "auto"
    recomputes: bool = False
    gathers_logits: bool = False
    exponentials: Exponentials = exponentials_
    further_weight: float = 0.0

    @property
    def num_terms(self) -> int:
        """Terms of the objective: those of the loss, and that of further tokens, which comes last."""
        return len(self.loss.terms) + (self.further_weight > 0)

    def counts(self, labels: Tensor, further_labels: Tensor) -> Tensor:
        """The sum of the counts of each term, float64."""
        own = [self.loss.counts(labels)] if self.loss.terms else []
        further = [(further_labels >= 0).sum().to(torch.float64).unsqueeze(0)] if self.further_weight else []
        return torch.cat((*own, *further))


class _Objective(torch.autograd.Function):
    """The first of two tensors; the second one gets the same gradient."""

    @staticmethod
    def forward(_ctx: Any, losses: Tensor, _term: Tensor) -> Tensor:
        return losses.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class OutputLayer(nn.Linear):
    """Linear layer without bias from the residual stream to logits, or with labels to the loss of each row.

    soft_cap: logits are soft_cap * tanh(logits / soft_cap); 0: they are not capped. See transform.
    computation: of the loss; parallelism replaces it.
    denominators: of the terms of the loss, float64 (terms,), over the global batch. term_sums: the parts of this rank's
    share of each term in the current step, (PARTS, terms), see parts_of. The terms are in the gradients, not in the
    loss of a row. See start_step.
    misses: if a list, each evaluation forward appends the wrong predictions per row. See count_misses.
    """

    watch = staticmethod(watch)
    gathers = True
    roles: ClassVar[Roles] = {"weight": SCORES}

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.soft_cap = 0.0
        self.computation = LossComputation()
        self.denominators: Tensor | None = None
        self.term_sums: Tensor | None = None
        self.misses: list[Tensor] | None = None

    def transform(self, logits: Tensor) -> Tensor:
        """An elementwise function of the logits, before the loss and in what forward returns: by default the soft cap.

        A subclass may override it, for a fixed temperature for example. It is called with the logits of some tokens and
        ids, in at least float32, which it must not change in place. It has no parameters: they would get no gradient.
        Scale the input of this layer to learn a temperature.
        """
        return logits if self.soft_cap == 0 else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def start_step(self, denominators: Tensor) -> None:
        """Set the denominators of the terms, and their sums to 0."""
        self.denominators, self.term_sums = denominators, denominators.new_zeros(PARTS, len(denominators))

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        num_valid: Tensor | None = None,
        further_labels: Tensor | None = None,
    ) -> Tensor:
        """Logits of x, (batch, seq_len, vocab_size), or with labels the share of each row in the mean loss, (batch,).

        x: (batch, seq_len, dim), in full on each rank of the tp axis. See LanguageModel.forward. further_labels: as
        labels, of as many rows of x that follow: their loss, without its terms, is a term of the objective.
        """
        has_transform = has_own(self, "transform", OutputLayer)
        if labels is None:
            return self.transform(super().forward(x)) if has_transform or self.soft_cap else super().forward(x)
        assert num_valid is not None, "labels without num_valid"
        weight, start, group = self.weight, 0, None
        if is_dtensor(weight):
            mesh, rows = weight.device_mesh, -(-self.out_features // weight.device_mesh.size())
            start, group = min(rows * mesh.get_local_rank(), self.out_features), mesh.get_group()
            weight = weight.to_local()
        how = self.computation
        is_registered = how.loss.needs_logits
        gathers = group is not None and (how.gathers_logits or is_registered)
        wide = torch.promote_types(x.dtype, torch.float32)
        further = None
        if further_labels is not None:
            x, further = x.chunk(2)
        columns = self.out_features if gathers else len(weight)
        chunk = tokens_per_chunk(how.chunk_tokens, columns * wide.itemsize, x.device.type, labels.numel())
        # A negative label is not valid.
        weights = (labels >= 0) / num_valid.clamp(min=1).to(wide).unsqueeze(1)
        transform = self.transform if has_transform else None
        caps = (self.soft_cap, transform)
        part = (chunk, start, self.out_features, group, gathers, *caps, how.loss, *self._term_sums())
        scoring = RegisteredLoss(*part) if is_registered else CrossEntropy(*part, how.exponentials)
        if self.misses is not None:
            is_miss = find_misses(x.flatten(0, 1), weight, labels.flatten(), scoring)
            self.misses.append(is_miss.view(labels.shape).sum(1))
        losses = self._losses(x, weight, labels, weights, scoring)
        if further is None or further_labels is None:
            return losses
        share, sums = self._shares()[-1], self.term_sums
        assert sums is not None
        weights = (further_labels >= 0) * (how.further_weight * share).to(wide)
        scoring = replace(scoring, loss=replace(how.loss, terms={}), shares=None, sums=None)
        term = self._losses(further, weight, further_labels, weights, scoring)
        sums[:, -1].add_(parts_of(term.detach().to(torch.float64).sum()))
        objective: Tensor = _Objective.apply(losses, term)  # type: ignore[no-untyped-call]
        return objective

    def _losses(self, x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, scoring: Scoring) -> Tensor:
        """The weighted loss of each row, (batch,)."""
        form = _Recomputed if self.computation.recomputes or not torch.is_grad_enabled() else _AtOnce
        losses: Tensor = form.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, 1),
            # A view, because the engine cannot say whether it needs the gradient of a leaf.
            weight.view_as(weight),
            labels.flatten(),
            weights.flatten(),
            scoring,
        )
        return losses.view(labels.shape).sum(1)

    def _term_sums(self) -> tuple[Tensor | None, Tensor | None]:
        """The shares and sums of the terms of the loss; None if there are none, or no gradients to compute."""
        count = len(self.computation.loss.terms)
        if not count or not torch.is_grad_enabled() or self.term_sums is None:
            return None, None
        return self._shares()[:count], self.term_sums[:, :count]

    def _shares(self) -> Tensor:
        """1 / the denominator of each term."""
        assert self.denominators is not None, "terms without denominators"
        return torch.where(self.denominators > 0, 1 / self.denominators, 0)


def find_misses(x: Tensor, weight: Tensor, labels: Tensor, scoring: Scoring) -> Tensor:
    """Whether the label of each token is valid and not the most likely token, (tokens,). Computes the logits of valid
    labels only."""
    valid = (labels >= 0).nonzero().squeeze(1)
    is_miss, buffer = torch.zeros_like(labels, dtype=torch.bool), scoring.buffer(x, weight)
    for part in scoring.chunks(len(valid)):
        tokens = valid[part]
        ids = scoring.most_likely(scoring.scores(x[tokens], weight, buffer)[0])
        is_miss[tokens] = ids != labels[tokens]
    return is_miss


def output_layers_of(model_parts: Iterable[nn.Module]) -> list[OutputLayer]:
    return [module for part in model_parts for module in part.modules() if isinstance(module, OutputLayer)]


@contextmanager
def count_misses(heads: Sequence[OutputLayer]) -> Iterator[list[Tensor]]:
    """Inside, each forward pass with labels and without gradients appends to the list: the number of valid labels in
    each row that are not the most likely token, (batch,)."""
    counts: list[Tensor] = []
    for head in heads:
        head.misses = counts
    try:
        yield counts
    finally:
        for head in heads:
            head.misses = None


def tokens_per_chunk(chunk_tokens: int | Literal["auto"], token_bytes: int, device_type: str, tokens: int) -> int:
    """The value of LossConfig.chunk_tokens if the logits of a token take `token_bytes` on this rank.

    tokens: of a microbatch on this rank. On a GPU, automatic chunks are as equal as multiples of ALIGNED_TOKENS can be.
    """
    if chunk_tokens != "auto":
        return chunk_tokens
    most = min(max(1, CHUNK_BYTES[device_type] // token_bytes), CHUNK_TOKENS[device_type])
    if device_type == "cpu" or most < ALIGNED_TOKENS:
        return most
    most -= most % ALIGNED_TOKENS
    count = -(-tokens // most)
    return -(-tokens // (count * ALIGNED_TOKENS)) * ALIGNED_TOKENS


class _AtOnce(torch.autograd.Function):
    """The weighted loss of each token. Forward computes the gradients, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, scoring: Scoring) -> Tensor:
        losses = torch.empty_like(weights)
        gradients, buffer = Gradients(x, weight, scoring, *ctx.needs_input_grad[:2]), scoring.buffer(x, weight)
        for tokens in scoring.chunks(len(x)):
            scores, backward = scoring.scores(x[tokens], weight, buffer)
            losses[tokens], scores_grad, factor = scoring.losses_and_gradient_(scores, labels[tokens], weights[tokens])
            gradients.add(tokens, backward(scores_grad), factor)
            del scores, scores_grad, backward
        ctx.gradients = list(gradients.result())
        return losses.mul_(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of the weight is summed over all tokens already: they must have the same factor.
        factor = torch.where((gradient == gradient[0]).all(), gradient[0], torch.nan)
        found: list[Tensor | None] = [None, None]
        for index, needs in enumerate(_needed(ctx)):
            if needs:
                found[index], ctx.gradients[index] = ctx.gradients[index].mul_(factor), None
        return *found, None, None, None


class _Recomputed(torch.autograd.Function):
    """The weighted loss of each token. Backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, scoring: Scoring) -> Tensor:
        losses, kept = torch.empty_like(weights), torch.empty_like(weights)
        buffer = scoring.buffer(x, weight)
        for tokens in scoring.chunks(len(x)):
            scores, _ = scoring.scores(x[tokens], weight, buffer)
            losses[tokens], kept[tokens] = scoring.losses_(scores, labels[tokens])
        ctx.save_for_backward(x, weight, labels, weights, kept)
        ctx.scoring = scoring
        return losses.mul_(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, weights, kept = ctx.saved_tensors
        scoring: Scoring = ctx.scoring
        gradients, buffer = Gradients(x, weight, scoring, *_needed(ctx)), scoring.buffer(x, weight)
        for tokens in scoring.chunks(len(x)):
            scores, before = scoring.scores(x[tokens], weight, buffer)
            of_tokens = (each[tokens] for each in (labels, weights, kept, gradient))
            scores_grad, factor = scoring.gradient_(scores, *of_tokens)
            gradients.add(tokens, before(scores_grad), factor)
        return *gradients.result(), None, None, None


def _needed(ctx: Any) -> list[bool]:
    """Whether backward needs the gradient of the input, and of the weight: a split backward pass calls it once for each
    of them."""
    return [is_needed_by_backward(node) for node, _ in ctx.next_functions[:2]]


class Gradients:
    """Gradients of the input and of the weight, added up over chunks of tokens, the weight's in at least float32."""

    def __init__(
        self, x: Tensor, weight: Tensor, scoring: Scoring, needs_x: bool = True, needs_weight: bool = True
    ) -> None:
        self._inputs, self._of, self._scoring = x, weight, scoring
        self._x = torch.empty_like(x) if needs_x else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None

    def add(self, tokens: slice, scores_grad: Tensor, factor: Tensor | None) -> None:
        """Add the gradients of a chunk, from that of its scores. factor: of each token, (tokens, 1); None: 1."""
        if self._scoring.gathers:
            scores_grad = scores_grad[:, self._scoring.start :][:, : len(self._of)]
        scores_grad = scores_grad.to(self._of.dtype)
        if self._x is not None:
            gradient = product(scores_grad, self._of.T)
            self._x[tokens] = gradient if factor is None else gradient * factor
        if self._weight is not None:
            inputs = self._inputs[tokens]
            scaled = inputs if factor is None else (inputs * factor).to(self._of.dtype)
            if self._weight.dtype == scaled.dtype:
                if is_by_onednn(scores_grad.T, scaled.T):
                    self._weight += weight_gradient(scores_grad, scaled)
                else:
                    self._weight.addmm_(scores_grad.T, scaled)
                return
            parts = zip(self._weight.split(PART_IDS), scores_grad.split(PART_IDS, 1), strict=True)
            for of_part, of_ids in parts:
                of_part += of_ids.T @ scaled

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of the weight, in their dtypes. With a cut vocabulary, x's is a part of a sum."""
        return self._x, None if self._weight is None else self._weight.to(self._of.dtype)
