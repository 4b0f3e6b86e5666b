"""The root of the configuration, and the sections [job] and [training], which several modules use."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.data.config import DataConfig, TokenizerConfig, ValidationConfig
from titanlite.faults.config import FaultsConfig
from titanlite.generation.config import SamplesConfig
from titanlite.metrics.config import MetricsConfig
from titanlite.models.family import Family, ModelConfig, resolve_model
from titanlite.models.head import LossConfig
from titanlite.models.losses import FURTHER_TOKENS
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.schedule import ScheduleConfig
from titanlite.parallel.compile import CompileConfig
from titanlite.parallel.float8 import Float8Config
from titanlite.parallel.mesh import ModelDtypes, ParallelismConfig
from titanlite.parallel.recompute import ActivationCheckpointConfig
from titanlite.precision import DTYPES, DtypeName
from titanlite.profiling.config import ProfilingConfig
from titanlite.ranks.distributed import CommConfig
from titanlite.runtime.determinism import DebugConfig
from titanlite.runtime.memory import MemoryConfig
from titanlite.runtime.settings import Affects, setting
from titanlite.storage.config import StorageConfig


@dataclass(frozen=True)
class JobSection:
    """Name and output folder of the run."""

    AFFECTS: ClassVar[Affects] = "nothing"

    dump_folder: str = setting("outputs", per_node=True, is_path=True)
    """Folder for all outputs of the run."""
    description: str = setting("", per_node=True)
    """Free text, logged at the start."""
    plugins: tuple[str, ...] = setting((), per_node=True, is_path=True)
    """Modules to import, which add families, sources, optimizers, ...: names, or paths that end in .py, beside the TOML
    file. Runs store them with a digest of their code."""
    take_over: bool = setting(False, once=True)
    """Take dump_folder, and a checkpoint.folder in a store, over from a job on another host that has ended. No effect
    if that job is known to run. That in a store is also taken over without this, after 90 s without its heartbeat."""


@dataclass(frozen=True)
class StageConfig:
    """One [[training.stages]] table: what changes from a step on. Keys that are left out keep the value that they have
    in the stage before; the first stage is [training] itself."""

    AFFECTS: ClassVar[Affects] = "facts"

    from_step: int = setting(
        -1,
        "write the first step of the stage; [training] has those before",
        least=2,
        unset=-1,
        automatic="by from_tokens",
    )
    """First step of the stage; steps count from 1."""
    from_tokens: int = setting(-1, "leave it out to give from_step", least=1, unset=-1)
    """In place of from_step: the stage begins with the first step after this number of tokens."""
    global_batch_size: int = setting(-1, "leave it out to keep the one before", least=1, most=2**20, unset=-1)
    """Sequences per optimizer step over all ranks."""
    seq_len: int = setting(-1, "leave it out to keep the one before", least=1, unset=-1)
    """Tokens per sequence."""
    weights: dict[str, float] = setting({}, "write a number: 0 leaves the source out of the stage", least=0, most=10**9)
    """Shares of the sequences by name of the source, relative to each other, in place of data.sources.N.weight. All
    sources have one; 0: not read in the stage."""
    rope_theta: float = setting(-1.0, "leave it out to keep the one before", above=0, unset=-1)
    """model.rope_theta; this key and those below need a family that has them."""
    rope_scaling_factor: float = setting(-1.0, "leave it out to keep the one before", least=1, unset=-1)
    """model.rope_scaling_factor."""
    rope_original_seq_len: int = setting(-1, "leave it out to keep the one before", least=1, unset=-1)
    """model.rope_original_seq_len."""
    rope_low_freq_factor: float = setting(-1.0, "leave it out to keep the one before", above=0, unset=-1)
    """model.rope_low_freq_factor."""
    rope_high_freq_factor: float = setting(-1.0, "leave it out to keep the one before", above=0, unset=-1)
    """model.rope_high_freq_factor."""
    rope_beta_fast: float = setting(-1.0, "leave it out to keep the one before", above=0, unset=-1)
    """model.rope_beta_fast."""
    rope_beta_slow: float = setting(-1.0, "leave it out to keep the one before", above=0, unset=-1)
    """model.rope_beta_slow."""


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batches and precision of the training."""

    steps: int = setting(1000, "set a positive number", least=1, affects="facts")
    """Total optimizer steps of the run."""
    tokens: int = setting(-1, "leave it out to give training.steps", least=1, unset=-1, affects="facts")
    """Total tokens of the run in place of steps, rounded up to full steps of global_batch_size x seq_len."""
    seq_len: int = setting(2048, "set a positive number", least=1, affects="facts")
    """Tokens per sequence."""
    local_batch_size: int = setting(8, "set a positive number; -1: as many as fit", least=1, unset=-1, affects="search")
    """Sequences per microbatch and data-parallel rank, at most: a rank's part of global_batch_size is divided into
    equal microbatches. -1: as many as fit into 90 % of rank 0's device, by the estimate of `titanlite plan`; needs a
    global_batch_size, and no pipeline."""
    global_batch_size: int = setting(
        -1,
        "it counts sequences: divide a number of tokens by seq_len; -1: local_batch_size x data-parallel ranks",
        least=1,
        most=2**20,
        unset=-1,
        automatic="local_batch_size x data ranks",
    )
    """Sequences per optimizer step over all ranks; gradient accumulation follows from it.
    -1: local_batch_size x data degree, resolved at the first start and kept by its checkpoints."""
    stages: tuple[StageConfig, ...] = setting((), affects="facts")
    """Changes of batch, length, mixture and rotary embeddings during the run: [[training.stages]] tables
    (docs/stages.md)."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 or less: no clipping."""
    bit_equal: bool = setting(False, affects="facts")
    """Weights, optimizer state, logged losses and gradient norms are equal bit for bit on any number of data ranks and
    pipeline stages. local_batch_size, with a pipeline parallelism.pp_microbatch_size, is then the exact number of
    sequences of a microbatch, which affects the numbers."""
    dtype: DtypeName = setting("float32", affects="facts")
    """Dtype of the parameters, and so of gradients and optimizer state."""
    mixed_precision_param: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on CUDA unless training.dtype is float64; else training.dtype."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of gradient reductions; auto: float32 on CUDA unless training.dtype is float64; else training.dtype."""

    @property
    def dtypes(self) -> ModelDtypes:
        """The dtypes of the model, of a resolved section."""
        return ModelDtypes(
            *(DTYPES[name] for name in (self.dtype, self.mixed_precision_param, self.mixed_precision_reduce))
        )


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
    float8: Float8Config = field(default_factory=Float8Config)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    @property
    def family(self) -> Family:
        """The family of [model]."""
        return resolve_model(self.model)[0]

    @property
    def hyper_parameters(self) -> Any:
        """The hyper-parameters of the model: those of the flavor, with the overrides of [model]."""
        return resolve_model(self.model)[1]

    @property
    def terms(self) -> list[str]:
        """Names of the terms of the objective beside the loss, in their order."""
        further = [FURTHER_TOKENS] if getattr(self.hyper_parameters, "n_further_tokens", 0) else []
        return [*self.loss.chosen.terms, *further]
