"""Random numbers of a model as a pure function of (seed, step, sequence, site, element): the same on every mesh.

No generator is involved, so recomputation, a pipeline and any cut of the batch see the same numbers, and nothing of
them has to be saved. Words are mixed by the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants from Vigna's public-domain splitmix64.c) in int64 arithmetic
that wraps around, on the CPU and on a GPU alike.

Quality: enough for dropout, noise and sampling, not for cryptography. A (seed, step, sequence) is one of 2^64 keys, a
key and a site are again one of 2^64: among k of them two are the same with a probability of about k^2 / 2^65, 3 % for
10^9. Elements of a site are all different words before they are cut to 24 bits.

Tensor parallelism: a module that holds a part of each row (the residual stream between "gather" modules, the features
behind a "column") draws as if its part were the whole, and so each tp rank draws the same for another part. Numbers are
those of every other mesh where the whole row is on each tp rank: on the input of a "gather" module.
"""

from math import prod

import torch
from torch import Tensor

DRAW_VERSION = 1
"""Version of the numbers. A change of any of them changes every run that draws, and has to change this."""

_GOLDEN = 0x9E3779B97F4A7C15
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def row_keys(seed: int, step: int, sequences: Tensor) -> Tensor:
    """A key for each row of a microbatch: int64 (rows,), on the device of `sequences`.

    step: of the optimizer, from 1. sequences: int64 (rows,), the number of each row in the run, as of a Batch.
    """
    keys = torch.zeros_like(sequences)
    for word in (seed, step):
        keys = _mixed(keys + _signed((word + 1) * _GOLDEN))
    return _mixed(keys + (sequences + 1) * _signed(_GOLDEN))


def uniform(keys: Tensor, site: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Independent numbers k / 2^24 in [0, 1): (rows, *shape), exactly the same on every device, in float32 and float64.

    keys: as of `row_keys`; a row's numbers depend on its own key only. site: name of the place in the whole model that
    draws ("layers.3.dropout"); places of the same name draw the same. The intermediate values take 8 bytes an element,
    a few times over, unless this is compiled.
    """
    row = _mixed(keys + _signed(_hash_of(site)))
    # Mixed by themselves first: elements next to each other would otherwise walk the same sequence for every key.
    elements = _mixed(torch.arange(1, prod(shape) + 1, device=keys.device) * _signed(_GOLDEN))
    words = _mixed(row[:, None] + elements)
    return _shifted(words, 40).to(dtype).mul(2.0**-24).view(-1, *shape)


def dropout(x: Tensor, p: float, keys: Tensor, site: str) -> Tensor:
    """x (rows, ...) with each element zero with probability p, else divided by 1 - p. See `uniform`."""
    numbers = uniform(keys, site, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.where(numbers < p, 0.0, x / (1 - p))


def _mixed(words: Tensor) -> Tensor:
    """The output function of SplitMix64, element by element."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted right as unsigned words; torch's own shift repeats the sign."""
    return words.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """The int64 with the lowest 64 bits of `word`."""
    return (word + 2**63) % 2**64 - 2**63


def _hash_of(text: str) -> int:
    """64 bits: FNV-1a (Fowler, Noll, Vo) over the characters, which torch.compile can follow."""
    value = _FNV_OFFSET
    for character in text:
        value = (value ^ ord(character)) * _FNV_PRIME % 2**64
    return value
