"""Facts that must be equal on all ranks of a run, since they decide its numbers, and those that may differ."""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import titanlite
from titanlite.config.fields import fields_of, setting_of
from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_facts
from titanlite.config.value_types import literal
from titanlite.data.fingerprint import source_facts
from titanlite.data.sources.base import Source, sampled_digest
from titanlite.data.tokenizer import Tokenizer
from titanlite.hf.folder import PREFIX
from titanlite.models.randomness import DRAW_VERSION
from titanlite.models.registry import full_parameters
from titanlite.optim.groups import kinds_of_state
from titanlite.parallel.microbatches import rows_together
from titanlite.planning.estimate import loss_chunk
from titanlite.ranks.agreement import MODULE
from titanlite.ranks.distributed import World
from titanlite.runtime.environment import read_system
from titanlite.runtime.plugins import MODULE_PREFIX, code_digest, plugin_digests

PACKAGES = ("numpy", "tokenizers", "datasets", "pyarrow")
"""Packages, beside torch, whose version decides tokens or weights."""

CUSTOMIZATIONS = ("sitecustomize", "usercustomize")
"""Modules that Python imports by itself, from any folder. One on a single rank is a difference, too."""

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_CUDNN_V8_API_DISABLED",
)
"""Environment variables that decide how numbers are computed. Others may differ: hosts, addresses, threads, folders."""


def program_facts(config: JobConfig, world: World, environment: Mapping[str, str]) -> dict[str, str]:
    """The configuration, the code and the environment of this rank. config: resolved. environment: at program start."""
    facts = {
        key: literal(value)
        for key, value in config_values(config)
        # the content of the files is compared instead, and checkpoints require a folder that all ranks share
        if not setting_of(key).per_node
    }
    # Ranks that start in different ways would wait for each other: compare how, as the paths may differ.
    path = config.checkpoint.initial_load_path
    start = "initial weights" if not path else "a model, hf:" if path.startswith(PREFIX) else "a checkpoint"
    facts |= {"checkpoint.initial_load_path": start, "device": world.device_type}
    digests = plugin_digests(config.job.plugins)
    facts |= {f"plugin {name}": f"sha256 {digest}" for name, digest in digests.items()}
    return facts | code_facts(environment)


def code_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The versions, the environment variables and the code that decide numbers.

    The code: all files of titanlite, and all imported modules that belong to neither Python nor an installed package.
    """
    facts = {"torch": torch.__version__, "Python": "{}.{}".format(*sys.version_info)}
    facts |= {package: _version(package) for package in PACKAGES}
    facts |= {name: environment[name] for name in VARIABLES if name in environment}
    root = os.path.dirname(titanlite.__file__)
    files = {f"titanlite{file.removeprefix(root)}": file for file in _own_files(root)} | _user_modules(root)
    return facts | {name: f"sha256 {_digest(file)}" for name, file in files.items()}


def computer_facts(device: torch.device) -> dict[str, Any]:
    """The software and the device, which checkpoints store. draws: version of the random numbers. code: digest of
    titanlite's files."""
    return {
        "titanlite": titanlite.__version__,
        "torch": str(torch.__version__),
        "draws": DRAW_VERSION,
        "code": _digest(*_own_files(os.path.dirname(titanlite.__file__))),
        "device": device_kind(device),
    }


def computation_facts(config: JobConfig, device: torch.device) -> dict[str, str]:
    """What decides the bits of a step, with training.bit_equal, and may differ between starts. config: resolved."""
    layout, training = config.parallelism, config.training
    facts = {"torch": torch.__version__, "titanlite": titanlite.__version__, "device": device_kind(device)}
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    facts |= {name: str(getattr(layout, name)) for name in ("tp", "cp", "ep") if getattr(layout, name) > 1}
    if layout.cp > 1:
        facts["context_parallel"] = layout.context_parallel
    if config.compile.enable:
        facts["compile"] = config.compile.backend
    rows, threads = rows_together(layout, training.local_batch_size), torch.get_num_threads()
    chunk = loss_chunk(config, config.hyper_parameters.vocab_size, device.type, rows)
    return facts | {"loss.chunk_tokens": str(chunk), "rows": str(rows), "threads": str(threads)}


def model_facts(config: JobConfig) -> dict[str, Any]:
    """What checkpoints store about the model and its training, without the data, as JSON values. config: resolved."""
    facts = {
        "model": {"family": config.model.family, **asdict(config.hyper_parameters)},
        "seq_len": config.training.seq_len,
        "dtype": config.training.dtype,
        "optimizer": kinds_of_state(config.optimizer, *full_parameters(config.model)),
    }
    if config.training.stages:
        facts["stages"] = stage_facts(config)
    return dict(json.loads(json.dumps(facts)))


def device_kind(device: torch.device) -> str:
    """The name of a GPU; of a CPU, its model and the instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = read_system("/proc/cpuinfo").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def content_facts(
    config: JobConfig,
    tokenizer: Tokenizer | None,
    data: Sequence[Source],
    validation: Sequence[Source],
    weights: Sequence[Path],
) -> dict[str, str]:
    """The tokenizer, its chat template, and the content of the files of data and of initial weights, by
    samples.

    data, validation: the sources, opened: there may be more files by now. weights: files that decide the initial
    weights.
    """
    facts = {"tokenizer": "none", "chat template": "none"}
    if tokenizer:
        template = (tokenizer.chat_template or "").encode()
        facts = {"tokenizer": tokenizer.fingerprint, "chat template": hashlib.sha256(template).hexdigest()}
    for section, sources in (("data", data), ("validation", validation)):
        for index, source in enumerate(sources):
            content = source_facts(source, config.data, tokenizer)
            facts |= {f"{section}.sources.{index}: {key}": str(content[key]) for key in content if key != "name"}
    return facts | {f"weights: {file.name}": sampled_digest(file).hex() for file in weights}


def config_values(config: JobConfig) -> Iterator[tuple[str, Any]]:
    """(full key, value) of all keys, as on the command line."""
    for section, values in fields_of(config).items():
        keys = fields_of(values)
        for name, value in (keys | keys.pop("kept", {}) | keys.pop("overrides", {})).items():
            if isinstance(value, tuple) and value and is_dataclass(value[0]):
                for index, row in enumerate(value):
                    yield from ((f"{section}.{name}.{index}.{key}", item) for key, item in fields_of(row).items())
            else:
                yield f"{section}.{name}", value


_version = cache(version)


def _own_files(package: str) -> list[str]:
    """The Python files of a package, as sorted paths."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names]
    return sorted([file for file in found if file.endswith(".py")], key=lambda file: file.split(os.sep))


def _digest(*files: str) -> str:
    """The digest of the contents of files, which are read again only after a change: a run needs it several times."""
    changed = [(file, os.stat(file)) for file in files]
    return _digest_of(tuple((file, status.st_mtime_ns, status.st_size) for file, status in changed))


@cache
def _digest_of(versions: tuple[tuple[str, int, int], ...]) -> str:
    return code_digest(Path(file).read_bytes() for file, _, _ in versions)


def _user_modules(package: str) -> dict[str, str]:
    """Name -> file of the imported modules that belong to neither Python, nor an installed package, nor `package`, and
    of CUSTOMIZATIONS; without the files of plugins, which have facts of their own."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    excluded = tuple(f"{folder}{os.sep}" for folder in (*installed, package))
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {
        name if name in CUSTOMIZATIONS else f"{MODULE}{name}": file
        for name, file in files.items()
        # torch has modules with file names that do not exist
        if file and (name in CUSTOMIZATIONS or not file.startswith(excluded)) and os.path.isfile(file)
        if not name.startswith(MODULE_PREFIX)
    }
