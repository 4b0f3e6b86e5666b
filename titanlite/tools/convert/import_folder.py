"""Import a folder in the format of Hugging Face's transformers as the dump folder of a run at step 0."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.assembly.run import checkpoint_facts
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import publish, writing_folder
from titanlite.checkpoint.manifest import Branch, Manifest, write_manifest, write_recorded
from titanlite.checkpoint.state import MODEL, first_not_finite
from titanlite.checkpoint.storage import first_failure, save_tensors
from titanlite.config.check import resolve_config
from titanlite.config.load import CONFIG_COPY
from titanlite.config.schema import JobConfig, JobSection, TrainingConfig
from titanlite.config.toml import dump_config
from titanlite.data.config import DataConfig, TokenizerConfig
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.hf.folder import ModelFolder
from titanlite.hf.generation_defaults import GENERATION_FILE
from titanlite.metrics.meter import MeterState
from titanlite.models.family import ModelConfig, stored_dtype
from titanlite.precision import DTYPES, DtypeName
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log


def kept_dtype(source: ModelFolder) -> DtypeName:
    """The dtype that preserves all values: the folder's own, or float32 if a run cannot have that (float16)."""
    widest = reduce(torch.promote_types, source.dtypes)
    names: tuple[DtypeName, ...] = get_args(DtypeName)
    return next((name for name in names if DTYPES[name] == widest), "float32")


def write_run(source: ModelFolder, folder: Path, out: Path, dtype: DtypeName) -> None:
    """Write the dump folder that will become `out` into the empty `folder`, synced to disk on return.

    Writes config.toml, the tokenizer if the source has one, and checkpoint/step-0 with the weights only. Holds two
    tensors in memory at a time. Raises UserError, OSError.
    """
    tokenizer = None
    if source.tokenizer_file is not None:
        Tokenizer(source.tokenizer_file).save(folder / TOKENIZER_FOLDER)
        tokenizer = Tokenizer(folder / TOKENIZER_FOLDER / "tokenizer.json")
        if tokenizer.vocab_size > source.hyper_parameters.vocab_size:
            log.warning(
                "The tokenizer has ids up to %d, but the model has only %d tokens: training and generation reject it",
                *(tokenizer.vocab_size - 1, source.hyper_parameters.vocab_size),
            )
        if tokenizer.conflict_of_bos:
            remedy = f"write data.add_bos = {str(not tokenizer.adds_bos).lower()} in runs from it"
            log.warning("BOS: %s: if the model was trained otherwise, %s", tokenizer.conflict_of_bos, remedy)
    config = _config(source, out, dtype, tokenizer)
    (folder / CONFIG_COPY).write_text(dump_config(config), encoding="utf-8")
    checkpoints = folder / CheckpointConfig.folder
    writing = writing_folder(checkpoints, 0)
    writing.mkdir(parents=True)
    weights = _Weights(source, DTYPES[dtype])
    try:
        records = save_tensors(writing, weights.without_values(), weights, None, file_per_tensor=True)
    except dcp.CheckpointException as error:
        raise UserError(f"cannot write {out}: {first_failure(error)}") from None
    if source.generation_config is not None:
        records[GENERATION_FILE] = write_recorded(writing / GENERATION_FILE, source.generation_config)
    resolved = resolve_config(config, world_size=1, device_type="cpu")
    unseen = replace(resolved, data=replace(resolved.data, sources=()))
    about = checkpoint_facts(unseen, tokenizer, (), torch.device("cpu"))
    manifest = Manifest(
        step=0,
        content="model",
        lineage=(Branch("imported", 0),),
        counts=asdict(MeterState(0, 0)),
        facts={**about.facts, "imported_from": source.name},
        config=json.loads(json.dumps(asdict(resolved))),
        versions=about.versions,
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        files=records,
    )
    write_manifest(writing, manifest)
    publish(checkpoints, 0)


def _config(source: ModelFolder, out: Path, dtype: DtypeName, tokenizer: Tokenizer | None) -> JobConfig:
    """The configuration of an untrained run. [model] names the nearest flavor and overrides all hyper-parameters, but
    for the initial distributions, which the format has not, and a balance loss of another meaning."""
    values = asdict(source.hyper_parameters)

    def differing(name: str) -> int:
        return sum(values[key] != value for key, value in asdict(source.family.flavors[name]).items())

    flavor = min(source.family.flavors, key=differing)
    own = asdict(source.family.flavors[flavor])
    values |= {name: own[name] for name in ("init_std", "init_by_depth") if name in own}
    theirs = source.family.exported.config_json(source.hyper_parameters).get("router_aux_loss_coef")
    ours = own.get("balance_loss")
    if theirs and theirs != ours and not source.has_own_loss:
        values["balance_loss"] = ours
        log.info(
            "model.balance_loss = %s, that of the flavor %s: router_aux_loss_coef = %s in config.json is the "
            "coefficient of another loss (docs/numerics.md); write it in [model] if an earlier titanlite exported it",
            *(ours, flavor, theirs),
        )
    path = str(Path(out, TOKENIZER_FOLDER).absolute()) if tokenizer is not None else ""
    return JobConfig(
        job=JobSection(dump_folder=str(out.absolute()), description=f"weights of {source.name}"),
        model=ModelConfig(source.family.name, flavor, values),
        tokenizer=TokenizerConfig(path),
        data=DataConfig(add_bos=tokenizer is not None and tokenizer.adds_bos),
        training=TrainingConfig(dtype=dtype, seq_len=min(TrainingConfig.seq_len, source.hyper_parameters.max_seq_len)),
        checkpoint=CheckpointConfig(enable=True),
    )


class _Weights(Mapping[str, Tensor]):
    """The parameters in `dtype`, by their names in a checkpoint. Each access reads the tensor; nothing is cached."""

    def __init__(self, source: ModelFolder, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def without_values(self) -> dict[str, Tensor]:
        return {
            MODEL + name: torch.empty(stored.shape, dtype=stored_dtype(name, self._dtype), device="meta")
            for name, stored in self._source.tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        own_name = name.removeprefix(MODEL)
        tensor = torch.empty(self._source.tensors[own_name].shape, dtype=stored_dtype(name, self._dtype))
        self._source.fill_({own_name: tensor})
        if first_not_finite({own_name: tensor}) is not None:
            raise UserError(f"{self._source.name}: {own_name} has values that are not finite in {self._dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (MODEL + name for name in self._source.tensors)

    def __len__(self) -> int:
        return len(self._source.tensors)
