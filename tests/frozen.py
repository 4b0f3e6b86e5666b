"""Imported last by the fork server: exclude all modules from garbage collections of its processes, which would copy
their memory pages (0.2 s per process)."""

import gc

gc.collect()
gc.freeze()
