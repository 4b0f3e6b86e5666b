"""Where logged numbers go: the console, metrics.jsonl, TensorBoard."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricsConfig:
    """What is logged, and where."""

    log_freq: int = 10
    """Steps between log lines; step 1 and the last step are always logged."""
    enable_tensorboard: bool = False
    """Whether the logged numbers also go to TensorBoard."""
    folder: str = "tb"
    """TensorBoard's folder, inside job.dump_folder."""
