"""Format the fastest layouts of a search as text: a table, why the others are slower, and options to paste."""

from collections.abc import Sequence
from math import prod

from titanlite.config.fields import value_of
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import literal
from titanlite.planning.hardware.machine import Profile
from titanlite.planning.search import TIE, Choice, Found, TooLarge
from titanlite.runtime.memory import GIB, USABLE
from titanlite.runtime.text import aligned, counted
from titanlite.tools.plan.report import Price, hours, mfu, tokens_per_second, tokens_per_step

HEAD = ("", "pp", "replicate", "shard", "cp", "tp", "ep", "rows", "recompute")
RESULTS = ("tokens/s", "MFU", "GiB", "idle", "sent GiB")


def describe_choices(
    found: Found, config: JobConfig, world_size: int, profile: Profile, memory_gib: float, price: Price
) -> str:
    """The report of `titanlite plan --search`."""
    lines = [
        f"Search: {counted(found.meshes, 'mesh')} of {counted(world_size, 'rank')} on {profile.name}",
        f"Batch: {config.training.global_batch_size:,} sequences of {config.training.seq_len:,} tokens = "
        f"{tokens_per_step(config):,} tokens per step",
    ]
    if not found.fastest:
        return "\n".join([*lines, "", *_nothing_fits(found, memory_gib)]) + "\n"
    best = found.fastest[0]
    table = [(*HEAD, *RESULTS), *(_row(number, choice, profile) for number, choice in enumerate(found.fastest, 1))]
    lines += ["", "Fastest first; tokens/s of one rank, the other columns of the rank with the most:", *aligned(table)]
    lines += ["", "Why the others are slower than 1, by part of the step, and what training takes:"]
    total = best.time.total
    for number, choice in enumerate(found.fastest, 1):
        cost = price.describe(hours(choice.config, choice.time), world_size)
        why = "" if choice is best else f" {choice.time.total / total - 1:+.1%}: {_differences(choice, best)};"
        lines.append(f"{number}:{why} {cost}")
    if found.best is not best:
        number = found.fastest.index(found.best) + 1
        lines.append(f"The fewest axes of those within {TIE:.0%}, which count as equal: {number}")
    if found.too_large:
        usable = f"{USABLE * memory_gib:.1f} GiB"
        lines += ["", f"Perhaps faster, but larger than the usable {usable}, with the least memory:"]
        lines += _sizes(found.too_large)
    lines += ["", "Options, to paste after the configuration:"]
    lines += [f"{number}: {options(choice, config)}" for number, choice in enumerate(found.fastest, 1)]
    return "\n".join(lines) + "\n"


def options(choice: Choice, config: JobConfig) -> str:
    """The settings of a choice that differ from `config`, for the command line."""
    words = []
    for key, value in choice.settings.items():
        if value_of(config, key) != value:
            words += [f"--{key}", literal(value).strip('"')]
    return " ".join(words) or "(as configured)"


def _row(number: int, choice: Choice, profile: Profile) -> Sequence[str]:
    config, time = choice.config, choice.time
    ranks = prod(choice.sizes.values())
    used = mfu(config, time, ranks, profile)
    mode = config.activation_checkpoint.mode
    return (
        f"{number}:",
        *(str(size) for size in choice.axes),
        str(choice.rows),
        config.activation_checkpoint.selective_policy if mode == "selective" else mode,
        f"{tokens_per_second(config, time, ranks):,.0f}",
        "-" if used is None else f"{used:.1%}",
        f"{choice.memory_bytes / GIB:.1f}",
        f"{time.parts['pipeline'] / time.total:.1%}",
        f"{choice.sent_bytes / GIB:.1f}",
    )


def _differences(choice: Choice, best: Choice) -> str:
    """The parts that take longer than those of the best choice, as shares of its step, the largest first."""
    more = {part: (choice.time.parts[part] - best.time.parts[part]) / best.time.total for part in best.time.parts}
    longer = sorted((part for part in more if more[part] > 0.0005), key=lambda part: -more[part])
    return ", ".join(f"{part} {more[part]:+.1%}" for part in longer[:3]) or "equal"


def _sizes(meshes: Sequence[TooLarge]) -> list[str]:
    return [f"  {each.mesh}: {each.memory_bytes / GIB:.1f} GiB" for each in meshes]


def _nothing_fits(found: Found, memory_gib: float) -> list[str]:
    usable = f"{USABLE * memory_gib:.1f} GiB"
    if not found.too_large:
        return ["No layout passes the checks of the configuration: give fewer keys, or plan one without --search"]
    return [f"No layout fits into the usable {usable}; those with the least memory:", *_sizes(found.too_large)]
