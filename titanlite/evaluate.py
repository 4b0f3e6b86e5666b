"""An older name of the command: `python -m titanlite evaluate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("titanlite.tools.evaluate", run_name="__main__", alter_sys=True)
