"""Command: compare layouts of a configuration with one process. Exit code 1 if a layout differs."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from titanlite.config.load import parse
from titanlite.config.schema import JobConfig
from titanlite.planning.estimate import require_estimate
from titanlite.runtime.errors import Problem, raise_problems
from titanlite.runtime.settings import setting
from titanlite.tools.command import (
    EITHER,
    ConfigFile,
    Count,
    File,
    check_output_file,
    print_lines,
    read_options_and_overrides,
    run_command,
    write_json,
)
from titanlite.tools.parity.bits import bits_lines, compare_bits, exact_config
from titanlite.tools.parity.compare import compare_layouts, run_reference
from titanlite.tools.parity.layouts import (
    EXAMPLE,
    FORM,
    MAX_RANKS,
    ONE_PROCESS,
    Layout,
    Refusal,
    check_layout,
    choose_layouts,
    layout_from_text,
)
from titanlite.tools.parity.measure import own_dtypes
from titanlite.tools.parity.report import (
    Table,
    bound_lines,
    head_lines,
    json_results,
    last_line,
    operand_lines,
    refusal_lines,
    routing_lines,
)
from titanlite.tools.parity.shrink import (
    at_boundaries,
    comparable_config,
    describe_shrinking,
    resolved_config,
    shrink_config,
)

LAYOUTS_HELP = f"compare these layouts: {FORM}, for example {EXAMPLE}:ZBVZeroBubble"


@dataclass(frozen=True)
class Options:
    """Compare layouts of CONFIG with one process, on this machine's CPU.

    Compares the hash of the initial weights, the tokens consumed, the loss, every parameter's gradient and the
    gradient norm: first in float64, then in the configuration's own dtypes ("auto" means training.dtype here).

    The reference does not use the trainer: it is the model in plain torch, the global batch, and one division. The
    layouts run the trainer on the configuration's own data. Labels are masked by a function of debug.seed and the
    sequence's number, so that sequences differ in their share of valid labels and one has no valid label: with equal
    shares, a wrong denominator would not be detected. Gradients are compared before clipping, and every step starts
    from the reference's weights, so that differences do not grow. The updates of CONFIG's own optimizer and schedule,
    with clipping, are compared in float64 given equal gradients: AdamW would turn rounding errors of gradients near
    zero into full-size updates. With --bits, layouts are compared with one another instead, by equality.

    CONFIG's own layout is ignored; its other keys apply. A global_batch_size of -1 means local_batch_size times the
    number of ranks (with --layouts, the least common multiple of their numbers of ranks).

    --section.key VALUE overrides a key of CONFIG, as for training. Exit code: 0 if all agree, 1 if a layout differs or
    a rank failed, 2 if the configuration has a problem.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    ranks: Annotated[Count, EITHER] = setting(4, "give a number in this range", least=1, most=MAX_RANKS)
    """compare all layouts of N ranks, and N - 1 data ranks"""
    layouts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYOUT ...", help=LAYOUTS_HELP), EITHER] = ()
    steps: Annotated[int, tyro.conf.arg(metavar="K")] = setting(2, least=1)
    """optimizer steps of each training stage"""
    bits: bool = False
    """compare by equality, with training.bit_equal: losses, gradient norms, weights and state of optimizers"""
    shrink: bool = False
    """reduce layers, widths, sequence length and batch, keeping divisibility"""
    json: File = None
    """also write the results to this file"""


def main(argv: Sequence[str]) -> None:
    """Print the comparison; exit with 1 if a layout differs. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "parity")
    parsed = parse(["--job.config_file", options.config, *overrides])
    raise_problems([*parsed.problems, *problems, *check_output_file("--json", options.json)])
    config, layouts, refused = prepare(options, parsed.config)
    steps = options.steps * (1 + len(config.training.stages))
    named = [ONE_PROCESS, *(layout for layout in layouts if layout != ONE_PROCESS)]
    for line in refusal_lines(refused):
        print_lines(line)
    results = []
    with TemporaryDirectory(prefix="titanlite-parity-") as folder:
        if options.bits:
            found = compare_bits(config, layouts, steps, folder)
            print_lines(*bits_lines(found))
            if options.json is not None:
                write_json(options.json, {"config": options.config, "steps": steps, "layouts": [*map(asdict, found)]})
            sys.exit(any(result.difference for result in found))
        references = run_reference(config, steps, folder)
        table = Table(named, own_dtypes(config), list(references[0].weights))
        for line in (*head_lines(config, steps, references), *bound_lines(config)):
            print_lines(line)
        print_lines("", *table.head())
        for group in compare_layouts(config, layouts, steps, references, folder):
            results += group
            print_lines(*(line for result in group for line in table.row(result)))
    print_lines("", *routing_lines(results), *operand_lines(results), last_line(results))
    if options.json is not None:
        write_json(options.json, json_results(options.config, config, references[0], results, refused))
    if any(result.verdict.first_difference for result in results):
        sys.exit(1)


def prepare(options: Options, given: JobConfig) -> tuple[JobConfig, list[Layout], list[Refusal]]:
    """The resolved configuration to compare, its layouts, and the refused layouts. Raises ConfigError."""
    found = [layout_from_text(text, given.parallelism.pp_schedule) for text in options.layouts]
    raise_problems([layout for layout in found if isinstance(layout, Problem)])
    layouts = list(dict.fromkeys(layout for layout in found if isinstance(layout, Layout)))
    ranks = lcm(*(layout.world_size for layout in layouts)) if layouts else options.ranks
    config = comparable_config(given, ranks)
    raise_problems(check_layout(config, ONE_PROCESS))
    if options.shrink:
        remedy = "leave it out, and override sizes of the model yourself"
        require_estimate(config, "--shrink", True, remedy)
        if config.float8.recipe in ("mxfp8", "blockwise"):
            rule = f"not with float8.recipe = {config.float8.recipe!r}, whose blocks are larger than a shrunk model"
            remedy = "leave it out, and lower model.n_layers, training.seq_len and training.global_batch_size"
            raise_problems([Problem("--shrink", True, rule, f'{remedy}, or float8.recipe = "rowwise"')])
        small = shrink_config(config, ranks)
        print_lines(f"shrunk: {describe_shrinking(config, small)}")
        config = small
        raise_problems(check_layout(config, ONE_PROCESS))
    if options.bits:
        config = exact_config(config)
        raise_problems(check_layout(config, ONE_PROCESS))
    config = at_boundaries(resolved_config(config), options.steps)
    if layouts:
        refused = [Refusal(layout, tuple(check_layout(config, layout))) for layout in layouts]
        for refusal in refused:
            at = f"layout {refusal.layout}: "
            raise_problems(Problem(f"{at}{p.key}", p.value, p.rule, p.remedy) for p in refusal.problems)
        return config, layouts, []
    layouts, refused = choose_layouts(config, options.ranks)
    if not layouts:
        raise_problems(list(dict.fromkeys(problem for refusal in refused for problem in refusal.problems)))
    return config, layouts, refused


if __name__ == "__main__":
    run_command(main)
