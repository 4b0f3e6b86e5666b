"""The old name of `titanlite inspect`, until version 1.0."""

import runpy
import sys

if __name__ == "__main__":
    print("titanlite: titanlite.data.inspect is an old name, use: titanlite inspect", file=sys.stderr)
    runpy.run_module("titanlite.tools.inspect", run_name="__main__", alter_sys=True)
