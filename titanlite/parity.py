"""The old name of `titanlite parity`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.parity is an old name, use: titanlite parity", file=sys.stderr)
    runpy.run_module("titanlite.tools.parity", run_name="__main__", alter_sys=True)
