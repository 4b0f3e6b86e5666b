"""The old name of `titanlite tokenize`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.data.tokenize is an old name, use: titanlite tokenize", file=sys.stderr)
    runpy.run_module("titanlite.tools.tokenize", run_name="__main__", alter_sys=True)
