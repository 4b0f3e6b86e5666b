"""The old name of `titanlite convert`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.convert is an old name, use: titanlite convert", file=sys.stderr)
    runpy.run_module("titanlite.tools.convert", run_name="__main__", alter_sys=True)
