"""An older name of the command: `python -m titanlite inspect`."""

import runpy

runpy.run_module("titanlite.tools.inspect", run_name="__main__", alter_sys=True)
