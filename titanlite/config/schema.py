"""The root of the configuration: the only place that sees all sections."""

from dataclasses import dataclass, field

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.training import TrainingConfig
from titanlite.data.config import DataConfig, TokenizerConfig
from titanlite.metrics.sinks import MetricsConfig
from titanlite.models.family import ModelConfig
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.schedule import ScheduleConfig
from titanlite.parallel.compile import CompileConfig
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.recompute import ActivationCheckpointConfig
from titanlite.runtime.determinism import DebugConfig
from titanlite.runtime.distributed import CommConfig
from titanlite.validation import ValidationConfig


@dataclass(frozen=True)
class JobSection:
    """What the run is called and where its outputs go."""

    config_file: str = ""
    """The TOML file; on the command line only."""
    dump_folder: str = "outputs"
    """Folder of everything that the run writes."""
    description: str = ""
    """Free text, shown at start."""
    take_over: bool = False
    """Says that the job which uses dump_folder has ended, where that cannot be seen from here (it ran on another host);
    a job that is seen to live keeps its folder all the same."""


@dataclass(frozen=True)
class JobConfig:
    """One run. Sections and keys are those of the TOML file and of the command line."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    comm: CommConfig = field(default_factory=CommConfig)
