"""Command: estimate what a run needs on N ranks, and which layout is the fastest. One process, no accelerator, no data,
no tokenizer."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from time import perf_counter
from typing import Annotated, Literal

import tyro

from titanlite.config.load import parse, resolve
from titanlite.config.schema import JobConfig
from titanlite.config.toml import COMMAND_LINE
from titanlite.planning.automatic import fit_memory
from titanlite.planning.estimate import Estimate, has_estimate, require_estimate
from titanlite.planning.hardware.machine import Profile, load_profile, profile_names
from titanlite.planning.search import search
from titanlite.planning.step_time import predict
from titanlite.runtime.errors import ConfigError, Problem, UsageError, UserError
from titanlite.runtime.memory import GIB
from titanlite.runtime.settings import setting
from titanlite.runtime.text import for_stdout
from titanlite.tools.command import ConfigFile, Count, print_text, read_options_and_overrides, run_command
from titanlite.tools.plan.choices import describe_choices
from titanlite.tools.plan.rehearsal.ranks import Processes, chosen_ranks, chosen_stages, require_rehearsable
from titanlite.tools.plan.rehearsal.report import GAPS, NODE, describe_rehearsal, problems_of
from titanlite.tools.plan.report import DEFAULT_GIB, Price, describe_time, estimate_largest, report, stage_heading


@dataclass(frozen=True)
class Options:
    """Memory, communication and idle time of a configuration on a number of ranks, before you run it; with a hardware
    profile also the time and cost, and with --search the fastest layouts.

    Override a key of CONFIG by --section.key VALUE, as for training; a search keeps these keys. Exit code 2 if training
    would refuse the configuration.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    world_size: Count = setting(MISSING, "give the number of processes of the run", least=1)
    """number of processes"""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = setting(None, is_path=True)
    """profile of the machine: the name of a shipped one, or a TOML file of `titanlite calibrate`"""
    search: bool = False
    """search the fastest layouts for these ranks; needs --hardware"""
    price_per_hour: Annotated[float | None, tyro.conf.arg(metavar="PRICE")] = setting(
        None, "give the price of one rank for an hour, in any currency", above=0, below=math.inf
    )
    """price of one rank for an hour, for the cost of the training; needs --hardware"""
    device: Annotated[Literal["cuda", "cpu"] | None, tyro.conf.arg(metavar="cuda|cpu")] = None
    """device that "auto" dtypes are resolved for; by default that of --hardware, else cuda"""
    device_memory_gib: Annotated[float | None, tyro.conf.arg(metavar="GIB")] = setting(
        None, "set the memory of one device in GiB, for example 80 for an H100", above=0, below=math.inf
    )
    """memory of one device; by default that of --hardware, else 80"""
    rehearse: bool = False
    """run the program of the ranks that can differ on tensors without data, on this machine: start, two steps, a save;
    exit code 2 if something is wrong"""
    rank: Annotated[int | None, tyro.conf.arg(metavar="N")] = setting(None, "give a rank of the run, from 0", least=0)
    """rehearse this rank only; needs --rehearse"""
    json: bool = False
    """print the rehearsal as JSON; needs --rehearse"""


class RehearsalError(UsageError):
    """What a rehearsal has found to be wrong. Raised after its output."""


def main(argv: Sequence[str]) -> None:
    """Print the plan. With --json, standard output is JSON also if an error ends the command. Raises UsageError."""
    try:
        print_plan(argv)
    except RehearsalError:
        raise
    except (UserError, KeyboardInterrupt) as error:
        if "--json" in argv:
            print_text(json.dumps({"stages": {}, "gaps": GAPS, "problems": [str(error) or "interrupted"]}))
        raise


def print_plan(argv: Sequence[str]) -> None:
    """Print what the options choose. Raises UsageError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "plan")
    if options.hardware is None:
        names = ", ".join(profile_names())
        remedy = f"add --hardware with one of {names}, or a file of titanlite calibrate"
        for name, given in (("--search", options.search), ("--price-per-hour", options.price_per_hour)):
            if given:
                problems.append(Problem(name, given, "only with --hardware, the profile of a machine", remedy))
    for name, is_given in (("--rank", options.rank is not None), ("--json", options.json)):
        if is_given and not options.rehearse:
            problems.append(Problem(name, True, "only with --rehearse", "add --rehearse"))
    if options.rank is not None and options.rank >= options.world_size:
        rule = f"below {options.world_size}, the number of processes"
        problems.append(Problem("--rank", options.rank, rule, "the first rank is 0"))
    if options.rehearse and options.device == "cpu":
        problems.append(Problem("--rehearse", True, "of GPUs", "leave out --device; on CPUs, run titanlite parity"))
    if options.rehearse and options.search:
        problems.append(Problem("--rehearse", True, "not with --search", "rehearse the layout that the search names"))
    if problems:
        raise ConfigError(problems)
    profile = load_profile(options.hardware) if options.hardware is not None else None
    if profile is not None and options.device not in (None, profile.device):
        raise UsageError(
            f"--device {options.device}: the profile {options.hardware} is of {profile.device}; leave it out"
        )
    device = options.device or (profile.device if profile else "cuda")
    memory_gib = options.device_memory_gib or (profile.memory_gib if profile else DEFAULT_GIB)
    words = ["--job.config_file", options.config, *overrides]
    parsed = parse(words)
    config = resolve(
        parsed, world_size=options.world_size, device_type=device, checks_files=False, any_layout=options.search
    )
    if not options.rehearse:
        require_estimate(config, "model.family", config.model.family, "choose a family of decoders")
    is_auto = config.parallelism.layout == "auto"
    if profile is not None and (options.search or is_auto):
        kept = {key for key, origin in parsed.origins.items() if is_auto or origin == COMMAND_LINE}
        print_search(config, options.world_size, profile, memory_gib, kept, options.price_per_hour)
        return
    if is_auto:
        raise UsageError('parallelism.layout = "auto" depends on the machine: add --hardware, the profile of one')
    config = fit_memory(config, options.world_size, device_type=device, memory_bytes=round(memory_gib * GIB))
    if options.rehearse:
        require_rehearsable(config)
    expected_s, plan, number = None, None, 0
    if has_estimate(config):
        number, of_stage, plan = estimate_largest(config, options.world_size, device_type=device)
        text = stage_heading(config, number) + report(of_stage, plan, memory_gib)
        if profile is not None:
            time = predict(of_stage, plan, profile)
            text += "\n" + describe_time(of_stage, plan, profile, time, Price(options.price_per_hour), run=config)
            expected_s = time.total
        if not options.json:
            sys.stdout.write(for_stdout(text))
            sys.stdout.flush()
    if options.rehearse:
        node = NODE if profile is None else profile.ranks_per_node
        processes = Processes(words, options.world_size, node=node, memory_bytes=round(memory_gib * GIB))
        print_rehearsal(options, processes, config, plan, number, memory_gib, expected_s)


def print_rehearsal(
    options: Options,
    processes: Processes,
    config: JobConfig,
    plan: Estimate | None,
    largest: int,
    memory_gib: float,
    expected_s: float | None,
) -> None:
    """Rehearse ranks, and print what they do. plan: of the training stage `largest`, from 0; None: of a family without
    one. expected_s: of a step. Raises RehearsalError if something is wrong."""
    begin, size, pp = perf_counter(), options.world_size, config.parallelism.pp
    ranks = [options.rank] if options.rank is not None else chosen_ranks(size, config.parallelism, plan)
    found = processes.rehearse(ranks, chosen_stages(config, size, largest))
    wrong = [
        f"training stage {stage + 1}, {line}" if len(found) > 1 else line
        for stage, of_stage in found.items()
        for line in problems_of(of_stage, size, pp, memory_gib)
    ]
    if options.json:
        stages = {stage + 1: of_stage for stage, of_stage in found.items()}
        content = {"stages": stages, "expected_step_s": expected_s, "gaps": GAPS, "problems": wrong}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        text = describe_rehearsal(found, size, memory_gib, perf_counter() - begin, expected_s)
        sys.stdout.write(for_stdout("\n" + text))
    sys.stdout.flush()
    if wrong:
        raise RehearsalError(*wrong)


def print_search(
    config: JobConfig, world_size: int, profile: Profile, memory_gib: float, kept: set[str], price: float | None
) -> None:
    """Print the fastest layouts."""
    found = search(config, world_size, profile, memory_gib=memory_gib, kept=kept)
    sys.stdout.write(for_stdout(describe_choices(found, config, world_size, profile, memory_gib, Price(price))))


if __name__ == "__main__":
    run_command(main)
