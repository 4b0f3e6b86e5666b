"""The commands: `titanlite COMMAND ...`, or `python -m titanlite COMMAND ...`. Imports only the chosen one."""

import gc
import os
import runpy
import sys
from difflib import get_close_matches
from typing import NoReturn

from titanlite import __version__
from titanlite.ranks.failure import end_on_interrupt
from titanlite.runtime.environment import safe_imports

COMMANDS = {
    "train": ("titanlite.train", "train a model; on several processes: titanlite.torchrun -m titanlite.train"),
    "sweep": ("titanlite.tools.sweep", "train all combinations of some values, and compare them"),
    "ladder": ("titanlite.tools.ladder", "train a ladder of sizes, and predict the loss of a larger run"),
    "critical-batch": ("titanlite.tools.sweep.critical_batch", "find the largest batch with which a run loses nothing"),
    "parity": ("titanlite.tools.parity", "compare layouts of a configuration with one process"),
    "plan": ("titanlite.tools.plan", "estimate memory, communication, idle time and speed of a layout"),
    "calibrate": ("titanlite.tools.calibrate", "measure this machine for the plan's predictions of time"),
    "profile": ("titanlite.tools.profile", "measure where the time of a configuration's steps goes"),
    "convert": ("titanlite.tools.convert", "convert between runs and Hugging Face model folders"),
    "generate": ("titanlite.tools.generate", "generate text with the model of a run"),
    "evaluate": ("titanlite.tools.evaluate", "compute the loss of a run's model on any data"),
    "inspect": ("titanlite.tools.inspect", "show a configuration's data, and the first sequences as text"),
    "schema": ("titanlite.tools.schema", "print the JSON schema of a configuration, for editors"),
    "tokenize": ("titanlite.tools.tokenize", "tokenize a configuration's data into token files"),
    "replay": ("titanlite.tools.replay", "recompute a step and compare it with what the run recorded"),
    "audit": ("titanlite.tools.audit", "recompute steps between checkpoints of a run and compare what comes out"),
    "compare": ("titanlite.tools.compare", "say whether two runs differ by more than rounding explains"),
    "ledger": ("titanlite.tools.ledger", "print what each step of a run was trained on"),
    "digest": ("titanlite.tools.digest", "print and compare digests of the weights of runs and model folders"),
    "report": ("titanlite.tools.report", "write a report of runs: one HTML file with charts"),
    "train-tokenizer": ("titanlite.tools.train_tokenizer", "train a tokenizer on a configuration's data"),
}
"""Command -> its module, and what it does."""

COMPLETION = "--tyro-print-completion"
SHELLS = ("bash", "zsh", "fish")


def main() -> None:
    """Run a command, and exit without a traceback after Ctrl-C and on a closed pipe."""
    end_on_interrupt()  # the import of torch takes seconds, and may swallow a KeyboardInterrupt
    gc.disable()  # a fifth less of these seconds; the command enables it
    os.environ.update(safe_imports())  # for all children, also those of libraries
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def run() -> None:
    """Run the command that the first argument names; without arguments, list the commands."""
    name, *arguments = sys.argv[1:] or ["--help"]
    option, equals, value = name.replace("_", "-").partition("=")
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print("usage: titanlite COMMAND ...; titanlite COMMAND --help shows its arguments\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        print(f"\n  --version, {COMPLETION} SHELL: print the version, a completion script for bash, zsh or fish")
    elif name == "--version":
        print(f"titanlite {__version__}")
    elif option == COMPLETION:
        shells = [value] * bool(equals) + arguments
        if len(shells) != 1 or shells[0] not in SHELLS:
            refuse(f"{COMPLETION} needs the name of a shell: {', '.join(SHELLS)}")
        run_module("titanlite.tools.completion", shells)
    elif name in COMMANDS:
        run_module(COMMANDS[name][0], arguments)
    elif name.startswith("-"):
        refuse(f"unknown option {name!r}: see titanlite --help")
    else:
        close = get_close_matches(name, COMMANDS, 1)
        remedy = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        refuse(f"unknown command {name!r}: {remedy}")


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module as a program with these arguments."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refuse(message: str) -> NoReturn:
    """Exit with a usage error."""
    print(f"titanlite: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
