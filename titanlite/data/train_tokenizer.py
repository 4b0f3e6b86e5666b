"""The old name of `titanlite train-tokenizer`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.data.train_tokenizer is an old name, use: titanlite train-tokenizer", file=sys.stderr)
    runpy.run_module("titanlite.tools.train_tokenizer", run_name="__main__", alter_sys=True)
