"""The command's arguments and its exit code: 0 where all agree, 1 where something differs or fails, 2 for the
configuration."""

import argparse
import os
import sys
from collections.abc import Sequence
from math import lcm
from pathlib import Path

from titanlite.config.load import parse_config
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.tools.command import run_command
from titanlite.tools.parity.compare import compare_layouts, run_reference, workplace
from titanlite.tools.parity.layouts import (
    FORM,
    ONE_PROCESS,
    Layout,
    Refusal,
    check_layout,
    choose_layouts,
    layout_from_text,
)
from titanlite.tools.parity.measure import own_dtypes
from titanlite.tools.parity.report import Table, bound_lines, head_lines, last_line, refusal_lines, write_json
from titanlite.tools.parity.shrink import comparable_config, describe_shrinking, resolved_config, shrink_config

DESCRIPTION = """\
Runs CONFIG on many layouts, on this machine's CPU, and compares each with one process: the hash of the initial
weights, the tokens consumed, the loss, every parameter's gradient, the grad norm. First in float64, then in the
configuration's own dtypes ("auto" is training.dtype here).

The reference is computed without the trainer: the model in plain torch, the whole global batch, one division. The
layouts run the trainer on the configuration's own data. Labels are masked on purpose, by a function of debug.seed and
the sequence's number, so that every sequence has another share of valid ones, and one has none: a wrong denominator
hides where all are alike. Gradients are taken before clipping. Updates are plain SGD with the configuration's
learning rate, without warm-up, decay and weight decay: AdamW would turn rounding errors of gradients that are nearly
zero into updates of full size. The layout that CONFIG itself has plays no part; its other keys do. A
global_batch_size of -1 is local_batch_size times the largest number of ranks.

Exit code: 0 all agree, 1 something differs or a rank failed, 2 the configuration has a problem.
"""


def main(argv: Sequence[str]) -> None:
    """Exits with 1 where a layout differs. Raises UserError."""
    own, given = parse_arguments(argv)
    config, layouts, refused = prepare(own, given)
    named = [ONE_PROCESS, *(layout for layout in layouts if layout != ONE_PROCESS)]
    for line in refusal_lines(refused):
        print(line)
    results = []
    with workplace() as folder:
        references = run_reference(config, own.steps, folder)
        table = Table(named, own_dtypes(config), list(references[0].weights))
        for line in (*head_lines(config, own.steps, references), *bound_lines(own_dtypes(config))):
            print(line)
        print(f"\n{table.head()}", flush=True)
        for group in compare_layouts(config, layouts, own.steps, references, folder):
            results += group
            print("\n".join(table.row(result) for result in group), flush=True)
    print(f"\n{last_line(results)}")
    if own.json is not None:
        write_json(own.json, own.config, config, own.steps, references, results, refused)
    if any(result.verdict.first_difference for result in results):
        sys.exit(1)


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, JobConfig]:
    """The command's own arguments, and the configuration as given. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "titanlite parity",
        description=DESCRIPTION,
        epilog="--section.key value overrides a key of CONFIG, as for training.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file, as for training")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ranks", type=int, default=4, metavar="N", help="all layouts of so many ranks (default: 4)")
    which.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT", help=FORM)
    parser.add_argument("--steps", type=int, default=1, metavar="K", help="optimizer steps (default: 1)")
    parser.add_argument(
        "--shrink", action="store_true", help="take layers, widths, sequence and batch down, keeping divisibility"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    own, rest = parser.parse_known_args(argv)
    config, problems = parse_config(["--job.config_file", own.config, *rest])
    for name in ("ranks", "steps"):
        if getattr(own, name) < 1:
            problems.append(Problem(f"--{name}", getattr(own, name), "at least 1", "a positive number"))
    if own.json is not None and (own.json.is_dir() or not os.access(own.json.absolute().parent, os.W_OK | os.X_OK)):
        rule = "a file in a folder that exists and may be written"
        problems.append(Problem("--json", str(own.json), rule, f"look at {own.json.absolute().parent}"))
    if problems:
        raise ConfigError(problems)
    return own, config


def prepare(own: argparse.Namespace, given: JobConfig) -> tuple[JobConfig, list[Layout], list[Refusal]]:
    """The resolved configuration that is compared, its layouts, and those that were refused. Raises ConfigError."""
    found = [layout_from_text(text, given.parallelism.pp_schedule) for text in own.layouts]
    require_none([layout for layout in found if isinstance(layout, Problem)])
    layouts = list(dict.fromkeys(layout for layout in found if isinstance(layout, Layout)))
    ranks = lcm(*(layout.world_size for layout in layouts)) if layouts else own.ranks
    config = comparable_config(given, ranks)
    require_none(check_layout(config, ONE_PROCESS))
    if own.shrink:
        small = shrink_config(config, ranks)
        print(f"shrunk: {describe_shrinking(config, small)}", flush=True)
        config = small
        require_none(check_layout(config, ONE_PROCESS))
    config = resolved_config(config)
    if layouts:
        refused = [Refusal(layout, tuple(check_layout(config, layout))) for layout in layouts]
        for refusal in refused:
            require_none(refusal.problems, f"layout {refusal.layout}")
        return config, layouts, []
    layouts, refused = choose_layouts(config, own.ranks)
    if not layouts:
        require_none(list(dict.fromkeys(problem for refusal in refused for problem in refusal.problems)))
    return config, layouts, refused


def require_none(problems: Sequence[Problem], where: str = "") -> None:
    """Raises ConfigError where there are problems; `where` says for which layout."""
    if problems:
        at = f"{where}: " if where else ""
        raise ConfigError(Problem(f"{at}{p.key}", p.value, p.rule, p.remedy) for p in problems)


if __name__ == "__main__":
    run_command(main)
