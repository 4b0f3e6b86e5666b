"""Command: convert between a run's checkpoints and model folders in the format of Hugging Face's transformers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from titanlite.hf.folder import PREFIX
from titanlite.hf.source import open_source
from titanlite.precision import DTYPES
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.logging import log, setup_logging
from titanlite.runtime.plugins import load_plugins
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import AllowImport, Folder, RunFolder, print_lines, run_command
from titanlite.tools.convert.export_run import write_folder
from titanlite.tools.convert.import_folder import kept_dtype, write_run
from titanlite.tools.convert.verify import check_tokenizer, format_owner, too_large, verify
from titanlite.tools.outputs import new_output, require_new
from titanlite.tools.saved_run import SavedRun, Weights, open_run
from titanlite.tools.stores import read_options_of_stores

EXPORT_DTYPES = DTYPES | {"float16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's model as a folder that transformers loads."""

    run: RunFolder = setting(is_path=True)
    """dump folder of a run, or one of its folders step-N; also an address in a store"""
    out: Folder = setting()
    """new folder"""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """of the weights; auto: as in the run"""
    weights: Weights = "last"
    """last: the weights of the checkpoint's step; ema: their average, of a run with optimizer.ema_decay above 0"""
    shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """maximum size of a file of weights: 5GB, 500MB, 2GiB"""
    verify: bool = False
    """compare logits even if memory may be short; otherwise skipped in that case"""
    no_verify: bool = False
    """do not compare the logits of the run and the folder"""
    allow_import: AllowImport = False


@dataclass(frozen=True)
class ImportOptions:
    """Write a model folder, or a model of the hub, as a run at step 0."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER|ORGANIZATION/NAME[@REVISION]")]
    """a folder, or a name on the hub"""
    out: Folder
    """new folder, the dump folder of the run"""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """of the weights; auto: as in the model folder"""


Options = (
    Annotated[ExportOptions, tyro.conf.subcommand("export")] | Annotated[ImportOptions, tyro.conf.subcommand("import")]
)


def main(argv: Sequence[str]) -> None:
    """Write a new folder, or nothing. Raises UserError."""
    options = read_options_of_stores(Options, argv, "convert")
    setup_logging(0)
    check_new(options.out)
    if isinstance(options, ExportOptions):
        export_folder(options)
    else:
        import_folder(options)


def check_new(out: Path) -> None:
    """Raise UserError if `out` exists; warn of folders that interrupted conversions to `out` have left."""
    require_new(out)
    for left in sorted(out.parent.glob(f"{out.name}.incomplete-*")):
        log.warning("%s was left by an interrupted conversion, or is being written now; remove it if none runs", left)


def export_folder(options: ExportOptions) -> None:
    shard_bytes = size_in_bytes(options.shard_size)
    run = open_run(options.run, allow_import=options.allow_import).with_weights(options.weights)
    write_export(run, options, shard_bytes)
    print_lines(f"{options.out} is complete. To load it: AutoModelForCausalLM.from_pretrained({str(options.out)!r})")


def write_export(run: SavedRun, options: ExportOptions, shard_bytes: int) -> None:
    """Write the folder options.out, complete or not at all. The weights are those of `run`. Raises UserError."""
    dtype = EXPORT_DTYPES.get(options.dtype, run.dtype)
    too_long = None if options.verify or options.no_verify else too_large(run, dtype)
    owner = format_owner(run.family)
    if owner is not None and (options.no_verify or too_long):
        advice = f"use --verify ({too_long})" if too_long else "leave out --no-verify"
        raise UserError(
            f"model.family = {run.family.name!r} has the hugging_face of {owner!r} and a build of its own: only the "
            f"comparison of logits shows whether both compute the same: {advice}, or give the Family a hugging_face of "
            "its own, or None"
        )
    average = "average of the weights, " if run.weights == "ema" else ""
    log.info("Exporting %s: %s%s", run.path, average, conversion(run.dtype, dtype))
    if run.manifest.config.get("float8", {}).get("recipe", "none") != "none":
        log.info("Not in float8: one rounding would not give the operands of both directions")
    if run.tokenizer() is None and run.manifest.facts["tokenizer"] is not None:
        log.warning("The run's tokenizer is missing: the folder will have no tokenizer")
    with new_output(options.out) as folder:
        folder.mkdir()
        files = write_folder(run, folder, dtype, shard_bytes)
        size = sum((folder / file).stat().st_size for file in files)
        log.info("Wrote %s of weights, %.1f MiB", counted(len(files), "file"), size / 2**20)
        if options.no_verify:
            log.info("Not verified (--no-verify)")
        elif too_long:
            log.warning("Not verified: %s; use --verify to compare anyway", too_long)
        else:
            log.info("Verified: %s", verify(run, folder, dtype))
        warning = check_tokenizer(run, folder)
        if warning:
            log.warning("%s", warning)


def import_folder(options: ImportOptions) -> None:
    load_plugins(())  # families of installed packages
    source = open_source(str(options.source).removeprefix(PREFIX))
    dtype = kept_dtype(source) if options.dtype == "auto" else options.dtype
    log.info("Importing %s: %s %s", source.name, source.family.name, source.describe(DTYPES[dtype]))
    if source.tokenizer_file is None:
        log.warning("%s has no tokenizer.json: the run will have no tokenizer", source.name)
    with new_output(options.out) as folder:
        folder.mkdir()
        write_run(source, folder, options.out, dtype)
    path = f"{options.out}/checkpoint"
    print_lines(f"{options.out} is complete. To train from it: its [model] section, and initial_load_path = '{path}'")


def conversion(old: torch.dtype, new: torch.dtype) -> str:
    before, after = (str(dtype).removeprefix("torch.") for dtype in (old, new))
    return after if before == after else f"converted from {before} to {after}"


def size_in_bytes(text: str) -> int:
    """Bytes of "5GB", "500MB", "2GiB", or of a plain number. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    number = float(found[1]) * UNITS[found[2] or ""] if found else 0.0
    if not 1 <= number < float("inf"):
        raise ConfigError([Problem("--shard-size", text, "a size in bytes", "write for example 5GB, 500MB or 2GiB")])
    return int(number)


if __name__ == "__main__":
    run_command(main)
