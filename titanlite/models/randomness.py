"""Random numbers of a model as a pure function of (seed, step, sequence, site, element): the same on every mesh.

There is no generator state, so recomputation, pipelines and any split of the batch give the same numbers, and
checkpoints need not save any. Words are mixed by the output function of SplitMix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants from Vigna's public-domain splitmix64.c) in int64
arithmetic that wraps around, on CPUs and GPUs.

Quality: sufficient for dropout, noise and sampling, not for cryptography. A (seed, step, sequence) maps to one of 2^64
keys, a key and a site to one of 2^64 words: among k of these, the probability of a collision is about k^2 / 2^65, 3 %
for 10^9. The elements of a site are distinct words before they are truncated to 24 bits.

Tensor parallelism: in a module that holds a shard of each row (the residual stream between "gather" modules, the
features after a "column" layer), each tp rank draws the same numbers for a different shard, so the numbers differ from
those of other meshes. At the input of a "gather" module each tp rank holds full rows, and the numbers are the same on
every mesh.
"""

import hashlib
from math import prod

import torch
from torch import Tensor

DRAW_VERSION = 1
"""Version of the numbers. Increment it with any change, since that changes every run with random numbers."""

_GOLDEN = 0x9E3779B97F4A7C15
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def row_keys(seed: int, step: int, sequences: Tensor) -> Tensor:
    """Keys of the rows of a microbatch: int64 (rows,), on the device of `sequences`.

    step: optimizer step, from 1. sequences: int64 (rows,), the number of each row in the run (see Batch.sequences).
    """
    keys = torch.zeros_like(sequences)
    for word in (seed, step):
        keys = _mixed(keys + _signed((word + 1) * _GOLDEN))
    return _mixed(keys + (sequences + 1) * _signed(_GOLDEN))


def words(seed: int, step: Tensor, site: str, elements: Tensor) -> Tensor:
    """Random words, int64, one for each of `elements`, int64 indexes of a tensor: those of SplitMix64 with a state that
    (seed, step, site) gives. step: scalar on their device."""
    key = _mixed(torch.full_like(elements[:1], _signed((seed + 1) * _GOLDEN)))
    key = _mixed(key + (step.to(torch.int64) + 1) * _signed(_GOLDEN))
    return _mixed(_mixed(key + _signed(_hash_of(site))) + (elements + 1) * _signed(_GOLDEN))


def uniform(keys: Tensor, site: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Independent numbers k / 2^24 in [0, 1): (rows, *shape), exactly the same on every device, in float32 and float64.

    keys: from `row_keys`; a row's numbers depend on its own key only. site: name of the place in the full model that
    draws ("layers.3.dropout"); equal names give equal numbers. Unless compiled, this needs several intermediate tensors
    of 8 bytes per element.
    """
    row = _mixed(keys + _signed(_hash_of(site)))
    # Mix the element indexes first; otherwise adjacent elements would run through the same sequence for every key.
    elements = _mixed(torch.arange(1, prod(shape) + 1, device=keys.device) * _signed(_GOLDEN))
    words = _mixed(row[:, None] + elements)
    return _shifted(words, 40).to(dtype).mul(2.0**-24).view(-1, *shape)


def dropout(x: Tensor, p: float, keys: Tensor, site: str) -> Tensor:
    """Set each element of x (rows, ...) to zero with probability p, else divide it by 1 - p. See `uniform`."""
    numbers = uniform(keys, site, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.where(numbers < p, 0.0, x / (1 - p))


def seed_microbatch(seed: int, step: int, sequence: int, part: int, device: torch.device) -> None:
    """Seed torch's generators, for models that draw from them, with a hash of the arguments.

    A resumed run on the same layout repeats the draws; on another layout they differ. sequence: the first sequence of
    the microbatch. part: of the layers and positions: pipeline stages and cp ranks draw independently of each other, tp
    ranks draw the same numbers. Does not sync with the device. The CPU's generator uses 32 bits of the derived seed.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{sequence}:{part}".encode()).digest()
    derived = int.from_bytes(digest[:8], "little")
    # torch.manual_seed does the same for all device types and takes 100 times as long.
    torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        torch.cuda.manual_seed(derived)


def _mixed(words: Tensor) -> Tensor:
    """Output function of SplitMix64, elementwise."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift extends the sign."""
    return words.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """The int64 with the lowest 64 bits of `word`."""
    return (word + 2**63) % 2**64 - 2**63


def _hash_of(text: str) -> int:
    """64-bit FNV-1a hash (Fowler, Noll, Vo) of the characters; torch.compile can trace it."""
    value = _FNV_OFFSET
    for character in text:
        value = (value ^ ord(character)) * _FNV_PRIME % 2**64
    return value
