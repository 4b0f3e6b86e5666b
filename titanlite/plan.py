"""An older name of the command: `python -m titanlite plan`."""

import runpy

runpy.run_module("titanlite.tools.plan", run_name="__main__", alter_sys=True)
