"""The [metrics] section."""

from dataclasses import dataclass
from pathlib import PurePath

from titanlite.runtime.errors import Problem, check_ranges, ranged, require
from titanlite.runtime.job_lock import JOB_LOCK_FILE

METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"
OWN_FILES = (
    *("config.toml", "tokenizer", METRICS_FILE, STARTS_FILE, JOB_LOCK_FILE, "ledger", "records", "faults"),
    *("traces", "memory_snapshots"),
)
"""Files that every run writes into job.dump_folder, in addition to the configured folders."""


@dataclass(frozen=True)
class MetricsConfig:
    """Logging of metrics."""

    log_freq: int = ranged(10, "1 logs every step", least=1)
    """Steps between log lines; step 1 and the last step are always logged."""
    enable_tensorboard: bool = False
    """Also write the logged numbers to TensorBoard."""
    folder: str = "tb"
    """TensorBoard's folder, inside job.dump_folder."""


def check_metrics(section: MetricsConfig) -> list[Problem]:
    """Check [metrics]."""
    folder = PurePath(section.folder)
    inside = bool(folder.parts) and not folder.is_absolute() and ".." not in folder.parts
    own = ("checkpoint", *OWN_FILES)
    return [
        *check_ranges(section, "metrics"),
        *require(
            inside,
            "metrics.folder",
            section.folder,
            "a folder inside job.dump_folder: not empty, relative, without '..'",
            'a plain name such as "tb"',
        ),
        *require(
            not inside or folder.parts[0] not in own,
            "metrics.folder",
            section.folder,
            f"not a name that the run itself uses ({', '.join(own)})",
            'another name, such as "tb"',
        ),
    ]
