"""The commands: `python -m titanlite COMMAND ...`, or `titanlite COMMAND ...`. Imports nothing before one is chosen."""

import runpy
import sys
from difflib import get_close_matches

COMMANDS = {
    "train": ("titanlite.train", "train a model; torchrun starts it with -m titanlite.train"),
    "parity": ("titanlite.tools.parity", "compare layouts of a configuration with one process"),
    "plan": ("titanlite.tools.plan", "memory, schedule and communication of a layout, before it is run"),
    "convert": ("titanlite.tools.convert", "to and from model folders of Hugging Face's transformers"),
    "generate": ("titanlite.tools.generate", "text from the model of a run"),
    "evaluate": ("titanlite.tools.evaluate", "the loss of a run's model on any data"),
    "inspect": ("titanlite.tools.inspect", "what a configuration's data holds, and the first sequences as text"),
    "tokenize": ("titanlite.tools.tokenize", "tokenize a configuration's data into token files"),
    "ledger": ("titanlite.tools.ledger", "what each step of a run was trained on"),
    "train-tokenizer": ("titanlite.tools.train_tokenizer", "train a tokenizer on a configuration's data"),
}
"""Command -> the module that runs it, and what it does."""


def main() -> None:
    """Run the command that the first argument names; without one, list them all."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print("usage: titanlite COMMAND ...; titanlite COMMAND --help says more\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        return
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        remedy = f"did you mean {close[0]}?" if close else f"the commands: {', '.join(COMMANDS)}"
        print(f"error: unknown command {name!r}: {remedy}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = arguments
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
