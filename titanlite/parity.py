"""An older name of the command: `python -m titanlite parity`."""

import runpy

runpy.run_module("titanlite.tools.parity", run_name="__main__", alter_sys=True)
