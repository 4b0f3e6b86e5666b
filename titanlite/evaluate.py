"""The old name of `titanlite evaluate`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.evaluate is an old name, use: titanlite evaluate", file=sys.stderr)
    runpy.run_module("titanlite.tools.evaluate", run_name="__main__", alter_sys=True)
