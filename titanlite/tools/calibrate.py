"""Command: measure the machine at hand for a hardware profile, in about a minute."""

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from titanlite.planning.hardware.calibration import calibrate, cores
from titanlite.planning.hardware.machine import dump_profile
from titanlite.precision import DTYPES
from titanlite.ranks.distributed import CommConfig, world_from_environment
from titanlite.ranks.network import connect
from titanlite.runtime.errors import Problem, UserError, raise_problems
from titanlite.runtime.logging import setup_logging
from titanlite.runtime.settings import setting
from titanlite.runtime.text import for_stdout
from titanlite.tools.command import File, OptionalCount, check_output_file, print_lines, read_options, run_command

DEFAULT_DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}


@dataclass(frozen=True)
class Options:
    """Measure this machine for `titanlite plan --hardware FILE`: matrix products and attention by shape and dtype, the
    bandwidth of the memory, each collective, and the overhead of operations.

    Takes about a minute; nothing else should run. On several nodes, start it by torchrun on each, with as many
    processes as training has: titanlite.torchrun ... -m titanlite.tools.calibrate --out FILE.
    """

    out: File = None
    """write the profile to this TOML file; without it, print it"""
    processes: OptionalCount = setting(None, "give the number of ranks of a training on this machine", least=1)
    """processes; by default, one per GPU, or per CPU core"""
    dtypes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DTYPE ...")] = ()
    """dtypes of computation; by default bfloat16 on GPUs, float32 on CPUs"""


def main(argv: Sequence[str]) -> None:
    """Measure and write the profile. Raises UserError."""
    options = read_options(Options, argv, "calibrate")
    unknown = [name for name in options.dtypes if name not in DTYPES]
    rule = f"of {', '.join(DTYPES)}"
    problems = [Problem("--dtypes", name, rule, "leave it out for the usual ones") for name in unknown]
    raise_problems([*problems, *check_output_file("--out", options.out)])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes = options.processes or gpus or cores()
    if "RANK" not in os.environ and processes > 1:
        sys.argv[1:] = ["--standalone", f"--nproc-per-node={processes}", "-m", "titanlite.tools.calibrate", *argv]
        runpy.run_module("titanlite.torchrun", run_name="__main__", alter_sys=True)
        return
    world = world_from_environment()
    setup_logging(world.rank, sys.stderr)
    profile = calibrate(world, connect(world, CommConfig()), options.dtypes or DEFAULT_DTYPES[world.device_type])
    if profile is None:
        return
    text = dump_profile(profile)
    if options.out is None:
        sys.stdout.write(for_stdout(text))
        return
    try:
        options.out.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"cannot write {options.out}: {error.strerror or error}; choose another path") from None
    print_lines(f"Wrote {options.out}: titanlite plan CONFIG --world-size N --hardware {options.out}")


if __name__ == "__main__":
    run_command(main)
