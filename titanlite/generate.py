"""An older name of the command: `python -m titanlite generate`."""

import runpy

runpy.run_module("titanlite.tools.generate", run_name="__main__", alter_sys=True)
