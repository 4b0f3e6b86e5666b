"""Imported last by the fork server: read the types of all keys and the files of titanlite, and exclude all objects from
garbage collections of its processes, which would copy their memory pages (0.2 s per process)."""

import gc

from titanlite.assembly.facts import code_facts
from titanlite.config.fields import SECTIONS
from titanlite.config.values import adapter_of
from titanlite.models.registry import FAMILIES

for section in SECTIONS:
    adapter_of(section, "llama3")
for family in FAMILIES:
    adapter_of("model", family)
code_facts({})
gc.collect()
gc.freeze()
