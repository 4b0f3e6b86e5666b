"""The README's table of verified layouts, measured: `python -m scripts.layout_table`, in the repository's root.

For each layout the largest relative error of any parameter's gradient, the loss and the gradient norm, over all ranks,
gradient_sync policies, accumulation 1, 2 and 4, and masks: what tests/distributed/test_data_parallel.py bounds.
"""

from tests.distributed.test_data_parallel import BOUNDS, LAYOUTS, all_cases
from titanlite.runtime.launch import run_ranks


def main() -> None:
    print(f"| dp_replicate | dp_shard | ranks | {' | '.join(BOUNDS)} |")
    print("|---|---|---|" + "---|" * len(BOUNDS))
    for world_size, layouts in LAYOUTS.items():
        for replicate, shard in layouts:
            worst = []
            for dtype in BOUNDS:
                ranks = run_ranks(all_cases, world_size, [(replicate, shard)], dtype)
                worst.append(max(error for cases in ranks for error, _, _ in cases.values()))
            print(f"| {replicate} | {shard} | {world_size} | {' | '.join(f'{error:.0e}' for error in worst)} |")


if __name__ == "__main__":
    main()
