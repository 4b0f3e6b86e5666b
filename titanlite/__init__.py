"""titanlite: pretraining of language models on any device mesh, with the same numbers on each of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.api import evaluate_run as evaluate_run
    from titanlite.api import export_run as export_run
    from titanlite.api import generate_text as generate_text
    from titanlite.api import load_config as load_config
    from titanlite.api import run as run
    from titanlite.models.watch import watch as watch
    from titanlite.registration import register_family as register_family
    from titanlite.registration import register_logger as register_logger
    from titanlite.registration import register_loss as register_loss
    from titanlite.registration import register_optimizer as register_optimizer
    from titanlite.registration import register_schedule as register_schedule
    from titanlite.registration import register_source as register_source
    from titanlite.registration import register_statistic as register_statistic
    from titanlite.registration import register_term as register_term
    from titanlite.runtime.errors import ConfigError as ConfigError
    from titanlite.runtime.errors import UserError as UserError
    from titanlite.tools.saved_run import open_run as open_run

__version__ = "0.1.0"

_PUBLIC = {
    "load_config": "titanlite.api",
    "run": "titanlite.api",
    "open_run": "titanlite.tools.saved_run",
    "generate_text": "titanlite.api",
    "evaluate_run": "titanlite.api",
    "export_run": "titanlite.api",
    "ConfigError": "titanlite.runtime.errors",
    "UserError": "titanlite.runtime.errors",
    "register_family": "titanlite.registration",
    "register_loss": "titanlite.registration",
    "register_logger": "titanlite.registration",
    "register_optimizer": "titanlite.registration",
    "register_schedule": "titanlite.registration",
    "register_source": "titanlite.registration",
    "register_statistic": "titanlite.registration",
    "register_term": "titanlite.registration",
    "watch": "titanlite.models.watch",
}
"""Public name -> the module that has it, imported when the name is first used: torch takes seconds."""

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return [name for name in (*globals(), *__all__) if name.startswith("__") or name in __all__]
