"""The losses of a run by name, their contract, and its check.

A loss is computed per token, so that it can be computed in chunks, on any mesh, and in a pipeline: the output layer
(models/head.py) gives it the logits of some tokens over the full vocabulary, and sums and divides.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.runtime.errors import UserError

TokenFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> one value per token, (tokens,), differentiable with respect to the logits.

logits: (tokens, vocab_size), in promote_types(dtype, float32); not to be changed in place. labels: int64 (tokens,),
negative for tokens that do not count, whose values are ignored. The value of a token must not depend on other tokens.
"""

CountFunction = Callable[[Tensor], Tensor]
"""labels -> (tokens,), bool or numbers of at least 0. labels: as for TokenFunction."""


@dataclass(frozen=True)
class Term:
    """A term of the objective beside the loss: the sum of `values` over the tokens of the global batch, divided by the
    sum of `count`; 0 if that sum is 0. A coefficient belongs into the values. Tokens with a negative label count in
    neither.

    of: what `values` gets beside the labels: "logits", or their "logsumexp" over the vocabulary, (tokens,). With the
    latter, the cross-entropy needs no logits of the full vocabulary on a rank.
    """

    values: TokenFunction
    count: CountFunction = torch.ones_like
    of: Literal["logits", "logsumexp"] = "logits"


@dataclass(frozen=True)
class Loss:
    """The loss of a token, of which a run reports the mean over the valid tokens, and further terms of the objective by
    name. Its methods raise UserError if a function does not return what it should."""

    name: str
    function: TokenFunction
    terms: Mapping[str, Term] = field(default_factory=dict)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, (tokens,); 0 for tokens that are not valid."""
        return _values(f'loss "{self.name}"', self.function, logits, labels)

    def term_values(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """The values of each term, (tokens,); 0 for tokens that are not valid. logits: or, if all terms are of it,
        their logsumexp, (tokens,)."""
        found = []
        for name, term in self.terms.items():
            takes_logits = term.of == "logits" or logits.dim() == 1
            found.append(_values(self._key(name), term.values, logits if takes_logits else logits.logsumexp(1), labels))
        return found

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss of a token is the cross-entropy, with any terms."""
        return self.function is cross_entropy

    @property
    def needs_logits(self) -> bool:
        """Whether it needs the logits of the full vocabulary on a rank."""
        return not self.is_cross_entropy or any(term.of == "logits" for term in self.terms.values())

    def counts(self, labels: Tensor) -> Tensor:
        """The sum of each term's counts, float64 (terms,). labels: int64 of any shape."""
        labels = labels.flatten()
        counts = [_counts(self._key(name), term.count, labels) for name, term in self.terms.items()]
        return torch.stack([each.sum() for each in counts])

    def _key(self, term: str) -> str:
        return f'loss "{self.name}", term "{term}"'


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each token in nats, in plain torch. The output layer computes it without logits of the full
    vocabulary."""
    return functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")


def z_loss(coefficient: float) -> Term:
    """coefficient * log(Z)^2, where Z is the sum of the exponentials of a token's logits (Chowdhery et al., "PaLM",
    2022, section 5): the cross-entropy alone does not change if all logits of a token grow by the same number."""
    return Term(partial(_z_loss, coefficient=coefficient), of="logsumexp")


def _z_loss(logsumexp: Tensor, labels: Tensor, coefficient: float) -> Tensor:
    del labels
    return coefficient * logsumexp.square()


FURTHER_TOKENS = "further_tokens"
"""Name of the term of the token after the next one, see OutputLayer."""
CROSS_ENTROPY = Loss("cross_entropy", cross_entropy)
LOSSES: dict[str, Loss] = {CROSS_ENTROPY.name: CROSS_ENTROPY}
TERMS: dict[str, Term] = {}
"""Terms that plugins have registered, for loss.terms."""

VALUES = "one float per token, (tokens,), computed from the logits and at least in their dtype"
COUNTS = "one number of at least 0, or bool, per token, (tokens,), computed from the labels alone"


def _values(key: str, function: TokenFunction, logits: Tensor, labels: Tensor) -> Tensor:
    """The values of tokens, 0 if a label is negative. Raises UserError by their type, shape and dtype: reads none."""
    values: Any = function(logits, labels)
    fault = ""
    if not isinstance(values, Tensor):
        fault = f"returns {type(values).__name__}"
    elif values.shape != logits.shape[:1]:
        fault = f"returns shape {tuple(values.shape)} for logits of shape {tuple(logits.shape)}"
    elif torch.promote_types(values.dtype, logits.dtype) != values.dtype:
        fault = f"returns {values.dtype} for logits in {logits.dtype}"
    elif logits.requires_grad and not values.requires_grad:
        fault = "returns values without a gradient"
    if fault:
        raise UserError(f"{key} {fault}: return {VALUES}")
    return torch.where(labels >= 0, values, 0)


def _counts(key: str, count: CountFunction, labels: Tensor) -> Tensor:
    """The counts of tokens, float64, 0 if a label is negative. Raises UserError by their type, shape and dtype."""
    counts: Any = count(labels)
    fault = ""
    if not isinstance(counts, Tensor):
        fault = f"returns {type(counts).__name__} as count"
    elif counts.shape != labels.shape:
        fault = f"returns a count of shape {tuple(counts.shape)} for labels of shape {tuple(labels.shape)}"
    elif counts.is_complex():
        fault = f"returns a count in {counts.dtype}"
    if fault:
        raise UserError(f"{key} {fault}: return {COUNTS}")
    return torch.where(labels >= 0, counts.to(torch.float64), 0)


TOKENS, IDS = 8, 24
"""Size of the logits of a check."""
CHUNKS = (TOKENS, 1, 3)
"""Tokens per call of a check."""
ALONE = "compute each token alone, without a mean or sum over tokens"


def check_loss(loss: Loss) -> None:
    """Call the functions of a loss and of its terms with small random logits in float64. Raises UserError if one does
    not return what it should, or if the value of a token depends on the other tokens that are computed with it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, IDS, dtype=torch.float64, generator=generator)
    labels = torch.randint(IDS, (TOKENS,), generator=generator)
    labels[2:4] = -1  # a chunk without a valid label, too
    _check_values(f'loss "{loss.name}"', loss.function, logits, labels)
    for name, term in loss.terms.items():
        key = loss._key(name)
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"{key} must have letters, digits, - and _ in its name: choose another name")
        _check_values(key, term.values, logits if term.of == "logits" else logits.logsumexp(1), labels)
        _check_counts(key, term.count, labels)


def _check_values(key: str, function: TokenFunction, logits: Tensor, labels: Tensor) -> None:
    found = _by_size(key, VALUES, lambda size: _values_in_chunks(key, function, logits, labels, size))
    if not all(part.isfinite().all() for part in found[0]):
        raise UserError(f"{key} returns values or gradients that are not finite: avoid divisions by 0, and log(0)")
    if not all(_are_close(one, other) for parts in found[1:] for one, other in zip(found[0], parts, strict=True)):
        raise UserError(f"{key} returns values that are random, or change with the size of a chunk: {ALONE}")


def _check_counts(key: str, count: CountFunction, labels: Tensor) -> None:
    found = _by_size(key, COUNTS, lambda size: _counts_in_chunks(key, count, labels, size))
    if not (found[0].isfinite() & (found[0] >= 0)).all():
        raise UserError(f"{key} returns counts that are negative or not finite: return {COUNTS}")
    if not all(torch.equal(found[0], other) for other in found[1:]):
        raise UserError(f"{key} returns counts that change with the size of a chunk: {ALONE}")


def _by_size(key: str, contract: str, compute: Callable[[int], Any]) -> list[Any]:
    """What `compute` returns for each size of a chunk. Raises UserError for any error."""
    try:
        return [compute(size) for size in CHUNKS]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{key} raises {type(error).__name__}: {error}; return {contract}; labels are negative for tokens that do "
            "not count: index with labels.clamp(min=0)"
        ) from error


def _values_in_chunks(
    key: str, function: TokenFunction, logits: Tensor, labels: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The values of the valid tokens, and the gradients of their sum, in chunks of `size` tokens."""
    values, gradients = [], []
    for chunk, of_chunk in zip(logits.split(size), labels.split(size), strict=True):
        leaf = chunk.clone().requires_grad_()
        with torch.enable_grad():
            found = _values(key, function, leaf, of_chunk)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
        values.append(found.detach()[of_chunk >= 0])
        gradients.append(gradient[of_chunk >= 0])
    return torch.cat(values), torch.cat(gradients)


def _counts_in_chunks(key: str, count: CountFunction, labels: Tensor, size: int) -> Tensor:
    """The counts of the valid tokens, in chunks of `size` tokens."""
    return torch.cat([_counts(key, count, chunk) for chunk in labels.split(size)])[labels >= 0]


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def extra_logits(loss: Loss) -> float:
    """The memory of a loss and its gradients beside the logits, as a multiple of their bytes: what autograd saves,
    found by calling the functions, and two gradients of that size, and another one for each term."""
    logits = torch.zeros(2, 1024, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(2, dtype=torch.int64)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = [loss.losses(logits, labels), *loss.term_values(logits, labels)]
    del kept
    saved.pop(logits.untyped_storage().data_ptr(), None)
    return sum(saved.values()) / logits.nbytes + 2 + len(loss.terms)
