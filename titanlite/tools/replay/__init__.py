"""Command: compute one step of a run again, and compare it with what the run recorded."""
