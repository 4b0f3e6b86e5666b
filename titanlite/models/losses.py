"""The losses of a run by name, their contract, and its check.

A loss is computed per token, so that it can be computed in chunks, on any mesh, and in a pipeline: the output layer
(models/head.py) gives it the logits of some tokens over the full vocabulary, and sums and divides.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.runtime.errors import Problem, UserError

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
    neither."""

    values: TokenFunction
    count: CountFunction


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
        """The values of each term, (tokens,); 0 for tokens that are not valid."""
        return [_values(self._key(name), term.values, logits, labels) for name, term in self.terms.items()]

    def counts(self, labels: Tensor) -> Tensor:
        """The sum of each term's counts, float64 (terms,). labels: int64 of any shape."""
        labels = labels.flatten()
        counts = [_counts(self._key(name), term.count, labels) for name, term in self.terms.items()]
        return torch.stack([torch.where(labels >= 0, each.to(torch.float64), 0).sum() for each in counts])

    def _key(self, term: str) -> str:
        return f'loss "{self.name}", term "{term}"'


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each token in nats, in plain torch. The output layer computes it without logits of the full
    vocabulary."""
    return functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")


CROSS_ENTROPY = Loss("cross_entropy", cross_entropy)
LOSSES: dict[str, Loss] = {CROSS_ENTROPY.name: CROSS_ENTROPY}

VALUES = "one float per token, (tokens,), computed from the logits and at least in their dtype"
COUNTS = "one number of at least 0, or bool, per token, (tokens,), computed from the labels alone"


def _values(key: str, function: TokenFunction, logits: Tensor, labels: Tensor) -> Tensor:
    values = function(logits, labels)
    if fault := _fault_of_values(values, logits):
        raise UserError(f"{key} {fault}: return {VALUES}")
    return torch.where(labels >= 0, values, 0)


def _counts(key: str, count: CountFunction, labels: Tensor) -> Tensor:
    counts = count(labels)
    if fault := _fault_of_counts(counts, labels):
        raise UserError(f"{key} {fault}: return {COUNTS}")
    return counts


def _fault_of_values(values: Any, logits: Tensor) -> str:
    """What is wrong with values of tokens, without reading them; "" if nothing is."""
    if not isinstance(values, Tensor):
        return f"returns {type(values).__name__}"
    if values.shape != logits.shape[:1]:
        return f"returns shape {tuple(values.shape)} for logits of shape {tuple(logits.shape)}"
    if torch.promote_types(values.dtype, logits.dtype) != values.dtype:
        return f"returns {values.dtype} for logits in {logits.dtype}"
    if logits.requires_grad and not values.requires_grad:
        return "returns values without a gradient"
    return ""


def _fault_of_counts(counts: Any, labels: Tensor) -> str:
    if not isinstance(counts, Tensor):
        return f"returns {type(counts).__name__} as count"
    if counts.shape != labels.shape:
        return f"returns a count of shape {tuple(counts.shape)} for labels of shape {tuple(labels.shape)}"
    return f"returns a count in {counts.dtype}" if counts.is_complex() else ""


TOKENS, IDS = 8, 24
"""Size of the logits of a check."""
CHUNKS = (TOKENS, 1, 3)
"""Tokens per call of a check."""
ALONE = "compute each token alone, without a mean or sum over tokens"


def check_loss(loss: Loss) -> list[Problem]:
    """Problems of a loss and its terms, found by calling their functions with small random logits in float64: also
    whether the value of a token is the same whichever other tokens are computed with it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, IDS, dtype=torch.float64, generator=generator)
    labels = torch.randint(IDS, (TOKENS,), generator=generator)
    labels[2:4] = -1  # a chunk without a valid label, too
    problems = _check_values(f'loss "{loss.name}"', loss.function, logits, labels)
    for name, term in loss.terms.items():
        key = loss._key(name)
        if not re.fullmatch(r"[\w-]+", name):
            problems.append(Problem(key, None, "letters, digits, - and _ in its name", "choose another name"))
        problems += _check_values(key, term.values, logits, labels)
        problems += _check_counts(key, term.count, labels)
    return problems


def _check_values(key: str, function: TokenFunction, logits: Tensor, labels: Tensor) -> list[Problem]:
    try:
        found = [_in_chunks(function, logits, labels, size) for size in CHUNKS]
    except Exception as error:
        return [_problem(key, error, VALUES)]
    if not all(part.isfinite().all() for part in found[0]):
        return [
            Problem(key, None, "finite values and gradients for ordinary logits", "avoid divisions by 0, and log(0)")
        ]
    if not all(_are_close(one, other) for parts in found[1:] for one, other in zip(found[0], parts, strict=True)):
        rule = "a value that does not depend on other tokens, and is not random; it changes with the size of a chunk"
        return [Problem(key, None, rule, ALONE)]
    return []


def _problem(key: str, error: Exception, rule: str) -> Problem:
    if isinstance(error, _FaultError):
        return Problem(key, None, f"{rule}; it {error}", ALONE)
    remedy = "fix the function; labels are negative for tokens that do not count: index with labels.clamp(min=0)"
    return Problem(key, None, f"{rule}; it raises {type(error).__name__}: {error}", remedy)


class _FaultError(Exception):
    """A function does not return what it should."""


def _in_chunks(function: TokenFunction, logits: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The values of the valid tokens, and the gradients of their sum, in chunks of `size` tokens."""
    values, gradients = [], []
    for chunk, of_chunk in zip(logits.split(size), labels.split(size), strict=True):
        leaf = chunk.clone().requires_grad_()
        with torch.enable_grad():
            found = function(leaf, of_chunk)
            if fault := _fault_of_values(found, leaf):
                raise _FaultError(fault)
            (gradient,) = torch.autograd.grad(torch.where(of_chunk >= 0, found, 0).sum(), leaf)
        values.append(found.detach()[of_chunk >= 0])
        gradients.append(gradient[of_chunk >= 0])
    return torch.cat(values), torch.cat(gradients)


def _check_counts(key: str, count: CountFunction, labels: Tensor) -> list[Problem]:
    try:
        found = [_counts_in_chunks(count, labels, size) for size in CHUNKS]
    except Exception as error:
        return [_problem(key, error, COUNTS)]
    if not (found[0].isfinite() & (found[0] >= 0)).all():
        return [Problem(key, None, COUNTS, "return counts that are finite and at least 0")]
    if not all(torch.equal(found[0], other) for other in found[1:]):
        return [Problem(key, None, "a count that does not depend on other tokens; it changes with their number", ALONE)]
    return []


def _counts_in_chunks(count: CountFunction, labels: Tensor, size: int) -> Tensor:
    """The counts of the valid tokens, in chunks of `size` tokens."""
    found = []
    for chunk in labels.split(size):
        counts = count(chunk)
        if fault := _fault_of_counts(counts, chunk):
            raise _FaultError(fault)
        found.append(counts)
    return torch.cat(found).to(torch.float64)[labels >= 0]


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
