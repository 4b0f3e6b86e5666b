"""An older name of the command: `python -m titanlite train-tokenizer`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("titanlite.tools.train_tokenizer", run_name="__main__", alter_sys=True)
