"""Imported last by the fork server: read the types of all keys, and exclude all objects from garbage collections of its
processes, which would copy their memory pages (0.2 s per process)."""

import gc

from titanlite.config.values import adapter_of

adapter_of("llama3")
gc.collect()
gc.freeze()
