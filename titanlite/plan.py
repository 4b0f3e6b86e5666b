"""The old name of `titanlite plan`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.plan is an old name, use: titanlite plan", file=sys.stderr)
    runpy.run_module("titanlite.tools.plan", run_name="__main__", alter_sys=True)
