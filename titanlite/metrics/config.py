"""The [metrics] section."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
EXPERTS_FILE = "experts.jsonl"
LOG_FILE = "train.log"
TENSORBOARD_FOLDER = "tb"
WANDB_FOLDER = "wandb"
MLFLOW_FOLDER = "mlruns"

PACKAGES = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", "pip install 'wandb>=0.31'"),
    "mlflow": ("mlflow", "pip install 'mlflow-skinny>=3'"),
}
"""Logger -> its package, and how to install it."""


LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
"""Those of titanlite."""
PLUGIN_LOGGERS: dict[str, Callable[..., Any]] = {}
"""Those of plugins: functions that build a SlowLogger (metrics/slow_loggers.py). They may read any key of [metrics]."""


def _tracks(section: "MetricsConfig") -> bool:
    """Whether the run has W&B or MLflow, or a logger of a plugin."""
    loggers = {*section.loggers}
    return bool(loggers & {"wandb", "mlflow"}) or not loggers <= {*LOGGERS}


_SHOWS = Needs('"console" in metrics.loggers', lambda section: "console" in section.loggers)
_TRACKS = Needs('"wandb" or "mlflow" in metrics.loggers', _tracks)


@dataclass(frozen=True)
class MetricsConfig:
    """Logging of metrics."""

    AFFECTS: ClassVar[Affects] = "nothing"

    log_freq: int = setting(10, "1 logs every step", least=1)
    """Steps between log lines; step 1 and the last step are always logged."""
    loggers: tuple[str, ...] = ("console", "jsonl")
    """Where the numbers go: console, jsonl (metrics.jsonl, required), tensorboard, wandb, mlflow: docs/loggers.md."""
    columns: tuple[str, ...] = setting((), needs=_SHOWS)
    """Further keys of metrics.jsonl as columns of the console, for example ["watch/entropy/3"]."""
    statistics: tuple[str, ...] = ()
    """Numbers of gradients and weights at the steps that are logged, by plugins (docs/models.md)."""
    project: str = setting("", needs=_TRACKS)
    """Project in W&B, experiment in MLflow. Empty: as their variables say, else titanlite."""
    group: str = setting("", needs=_TRACKS)
    """Group of the run in W&B; the tag `group` in MLflow."""
    tags: tuple[str, ...] = setting((), needs=_TRACKS)
    """Tags of the run in W&B and MLflow."""


def check_metrics(section: MetricsConfig) -> list[Problem]:
    """Check [metrics]."""
    rules = Rules("metrics", section)
    rule = f'with "jsonl": a resumed run and `titanlite report` read {METRICS_FILE}'
    remedy = f"add it: {[*section.loggers, 'jsonl']}".replace("'", '"')
    rules.require("loggers", "jsonl" in section.loggers, rule, remedy)
    missing = [name for name in PACKAGES if name in section.loggers and find_spec(PACKAGES[name][0]) is None]
    rule = f"loggers whose packages are installed: {', '.join(missing)} is missing"
    rules.require("loggers", not missing, rule, " and ".join(PACKAGES[name][1] for name in missing))
    return rules.problems
