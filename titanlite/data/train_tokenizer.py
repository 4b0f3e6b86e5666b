"""An older name of the command: `python -m titanlite train-tokenizer`."""

import runpy

runpy.run_module("titanlite.tools.train_tokenizer", run_name="__main__", alter_sys=True)
