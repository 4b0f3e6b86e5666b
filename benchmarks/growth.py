"""How speed and memory grow with layers, width, sequence length, vocabulary and ranks.

From the quick start's model (6 layers, width 256, sequences of 256 tokens, vocabulary 4,096) one size changes at a
time; a step always has 2,048 tokens. Two ranks share them (dp_shard). Every measurement runs in new processes, as in
the benchmark "memory"; a round measures each size once. `python -m scripts.growth_picture FOLDER` draws the figures.
"""

from pathlib import Path
from typing import Literal, get_args

from benchmarks.measuring import Layout, Row, case, report
from benchmarks.memory import measure_all

Axis = Literal["layers", "width", "sequence", "vocabulary", "ranks"]
TOKENS = 2048
SIZES: dict[Axis, dict[int, tuple[str, ...]]] = {
    "layers": {size: (f"model.n_layers={size}",) for size in (2, 6, 12, 24)},
    "width": {
        size: (
            f"model.dim={size}",
            f"model.ffn_dim={3 * size}",
            *(f"model.{key}={size // 16}" for key in ("n_heads", "n_kv_heads")),
        )
        for size in (128, 256, 512)
    },
    "sequence": {
        size: (
            f"training.seq_len={size}",
            *(f"training.{key}_batch_size={TOKENS // size}" for key in ("local", "global")),
        )
        for size in (128, 256, 512, 1024)
    },
    "vocabulary": {size: (f"model.vocab_size={size}",) for size in (4096, 16_384, 65_536)},
    "ranks": {1: (), 2: ()},
}
"""Axis -> size -> its settings."""


def main(
    axes: tuple[Axis, ...] = get_args(Axis),
    rounds: int = 3,
    steps: int = 4,
    settings: tuple[str, ...] = (),
    json: Path | None = None,
) -> None:
    """settings: of the model from which the sizes change, such as model.n_layers=2. json: folder of growth.json."""
    cases = {}
    for axis in axes:
        for size, own in SIZES[axis].items():
            layout: Layout = "dp_shard" if (axis, size) == ("ranks", 2) else "single"
            cases[axis, size] = case(layout, 1, (*settings, *own))
    rows: list[Row] = [
        {"axis": axis, "size": size, **found} for (axis, size), found in measure_all(cases, rounds, steps).items()
    ]
    report("growth", {"Growth": rows}, json)
