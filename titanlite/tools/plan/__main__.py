"""What a run would need on N ranks: `python -m titanlite plan CONFIG --world-size N [--section.key value ...]`.

One process, no accelerator, no data, no tokenizer. Exit code 2 where training would refuse the configuration.
"""

import argparse
import math
import sys

from titanlite.config.load import load_config
from titanlite.runtime.errors import ConfigError, require
from titanlite.runtime.failure import FailureReport, end_process
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.report import report


def main() -> None:
    """Prints the plan."""
    parser = argparse.ArgumentParser(
        prog="python -m titanlite plan",
        description="Memory, communication and idle time of a configuration on a number of ranks.",
        epilog="--section.key value overrides a key of CONFIG, as for training.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file, as for training")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help='what "auto" dtypes go by')
    parser.add_argument("--device-memory-gib", type=float, default=80.0, metavar="GIB", help="of one device")
    own, rest = parser.parse_known_args()
    problems = [
        *require(own.world_size >= 1, "--world-size", own.world_size, "at least 1", "the number of processes"),
        *require(
            0 < own.device_memory_gib < math.inf,
            "--device-memory-gib",
            own.device_memory_gib,
            "above 0 and finite",
            "80 is that of an H100",
        ),
    ]
    if problems:
        raise ConfigError(problems)
    arguments = ["--job.config_file", own.config, *rest]
    config = load_config(arguments, world_size=own.world_size, device_type=own.device, looks_at_files=False)
    print(report(config, estimate(config, own.world_size, device_type=own.device), own.device_memory_gib), end="")


if __name__ == "__main__":
    with FailureReport():
        main()
    sys.stdout.flush()
    end_process(0)
