"""The old name of `titanlite generate`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.generate is an old name, use: titanlite generate", file=sys.stderr)
    runpy.run_module("titanlite.tools.generate", run_name="__main__", alter_sys=True)
