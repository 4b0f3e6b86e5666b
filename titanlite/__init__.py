"""titanlite: pretraining of language models on any device mesh, with the same numbers on each of them."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "register_family": "titanlite.registration",
    "register_loss": "titanlite.registration",
    "register_logger": "titanlite.registration",
    "register_optimizer": "titanlite.registration",
    "register_schedule": "titanlite.registration",
    "register_source": "titanlite.registration",
}
"""Public name -> its module, which is imported at the first use of the name."""


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
