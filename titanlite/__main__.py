"""The commands: `titanlite COMMAND ...`, or `python -m titanlite COMMAND ...`. Imports only the chosen one."""

import os
import runpy
import sys
from difflib import get_close_matches

from titanlite import __version__

COMMANDS = {
    "train": ("titanlite.train", "train a model; on several processes: torchrun -m titanlite.train"),
    "parity": ("titanlite.tools.parity", "compare layouts of a configuration with one process"),
    "plan": ("titanlite.tools.plan", "estimate memory, communication and idle time of a layout"),
    "convert": ("titanlite.tools.convert", "export to, or import from, model folders of Hugging Face"),
    "generate": ("titanlite.tools.generate", "generate text with the model of a run"),
    "evaluate": ("titanlite.tools.evaluate", "compute the loss of a run's model on any data"),
    "inspect": ("titanlite.tools.inspect", "show a configuration's data, and the first sequences as text"),
    "tokenize": ("titanlite.tools.tokenize", "tokenize a configuration's data into token files"),
    "replay": ("titanlite.tools.replay", "compute a step of a run again, and compare it with the run's record"),
    "ledger": ("titanlite.tools.ledger", "print what each step of a run was trained on"),
    "train-tokenizer": ("titanlite.tools.train_tokenizer", "train a tokenizer on a configuration's data"),
}
"""Command -> its module, and what it does."""

COMPLETION = "--tyro-print-completion"


def main() -> None:
    """Run a command, and exit without a traceback after Ctrl-C and on a closed pipe."""
    try:
        run()
        sys.stdout.flush()
    except KeyboardInterrupt:  # while a command's modules are imported, which takes seconds
        print("titanlite: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def run() -> None:
    """Run the command that the first argument names; without arguments, list the commands."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print("usage: titanlite COMMAND ...; titanlite COMMAND --help shows its arguments\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        print(f"\n  --version, {COMPLETION} SHELL: print the version, a completion script for bash, zsh or fish")
    elif name == "--version":
        print(f"titanlite {__version__}")
    elif name in COMMANDS or name == COMPLETION:
        module = COMMANDS[name][0] if name in COMMANDS else "titanlite.completion"
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        close = get_close_matches(name, COMMANDS, 1)
        remedy = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        print(f"titanlite: unknown command {name!r}: {remedy}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
