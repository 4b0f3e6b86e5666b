"""Command: between a run's checkpoints and model folders in the format of Hugging Face's transformers.

python -m titanlite convert export RUN --out DIR [--dtype D] [--shard-size 5GB] [--verify | --no-verify]
python -m titanlite convert import FOLDER_OR_HUB_NAME --out DIR [--dtype D]
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from titanlite.checkpoint.storage import sync_folder
from titanlite.hf.folder import PREFIX
from titanlite.hf.source import open_source
from titanlite.precision import DTYPES
from titanlite.runtime.logging import log, setup_logging
from titanlite.tools.command import appears_complete, require_new, run_command
from titanlite.tools.convert.export_run import write_folder
from titanlite.tools.convert.import_folder import kept_dtype, write_run
from titanlite.tools.convert.verify import check_tokenizer, too_large, verify
from titanlite.tools.saved_run import open_run

EXPORT_DTYPES = DTYPES | {"float16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str]) -> None:
    """Writes a new folder, or nothing. Raises UserError."""
    parser = argparse.ArgumentParser(
        "titanlite convert",
        description="To and from model folders of Hugging Face's transformers.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="export | import")
    export = commands.add_parser("export", help="a run's model as a folder for transformers", allow_abbrev=False)
    export.add_argument("run", type=Path, metavar="RUN", help="dump folder of a run, or one of its folders step-N")
    export.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder")
    export.add_argument("--dtype", choices=sorted(EXPORT_DTYPES), help="of the weights; default: as in the run")
    export.add_argument("--shard-size", type=size, default="5GB", metavar="SIZE", help="of a file; default: 5GB")
    export.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare logits before the folder gets its name; default: where two copies of the model fit in memory",
    )
    export.set_defaults(command=export_run)
    imports = commands.add_parser("import", help="such a folder as a run that has not begun", allow_abbrev=False)
    imports.add_argument("source", metavar="FOLDER|ORGANISATION/NAME[@REVISION]", help="a folder, or a name on the hub")
    imports.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder, a run's dump folder")
    imports.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights; default: as they are")
    imports.set_defaults(command=import_folder)
    own = parser.parse_args(argv)
    setup_logging(0)
    require_new(own.out)
    for left in sorted(own.out.parent.glob(f"{own.out.name}.incomplete-*")):
        log.warning(
            "%s is what an interrupted conversion has left, or one that runs beside this; it may be removed", left
        )
    own.command(own)


def export_run(own: argparse.Namespace) -> None:
    run = open_run(own.run)
    dtype = EXPORT_DTYPES[own.dtype] if own.dtype else run.dtype
    why_not = "--no-verify" if own.verify is False else None
    if own.verify is None and (reason := too_large(run, dtype)):
        why_not = f"{reason}; --verify does it all the same"
    log.info("Exporting %s: %s", run.path, conversion(run.dtype, dtype))
    if run.tokenizer() is None and run.manifest.facts["tokenizer"] is not None:
        log.warning("The run's tokenizer is not there any more: the folder will have none")
    with new_folder(own.out) as folder:
        files = write_folder(run, folder, dtype, own.shard_size)
        log.info("Wrote %d file(s) of weights, %.1f MiB", len(files), weights_bytes(folder, files) / 2**20)
        if why_not is None:
            log.info("Verified: %s", verify(run, folder, dtype))
        else:
            log.warning("Not verified: %s", why_not)
        warning = check_tokenizer(run, folder)
        if warning:
            log.warning("%s", warning)
    print(f"{own.out} is complete. To load it: AutoModelForCausalLM.from_pretrained({str(own.out)!r})")


def import_folder(own: argparse.Namespace) -> None:
    source = open_source(own.source.removeprefix(PREFIX))
    dtype = own.dtype or kept_dtype(source)
    log.info("Importing %s: %s %s", source.name, source.family.name, source.describe(DTYPES[dtype]))
    if source.tokenizer_file is None:
        log.warning("%s has no tokenizer.json: the run will have no tokenizer", source.name)
    with new_folder(own.out) as folder:
        write_run(source, folder, own.out, dtype)
    print(
        f"{own.out} is complete. To train from it: its [model] section, and initial_load_path = '{own.out}/checkpoint'"
    )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Where to write what is on the disk at the end of the block: it gets its name then, or never. Raises UserError."""
    with appears_complete(out) as temporary:
        temporary.mkdir()
        yield temporary
    sync_folder(out.absolute().parent)


def conversion(there: torch.dtype, here: torch.dtype) -> str:
    before, after = (str(dtype).removeprefix("torch.") for dtype in (there, here))
    return after if before == after else f"converted from {before} to {after}"


def weights_bytes(folder: Path, files: Sequence[str]) -> int:
    return sum((folder / file).stat().st_size for file in files)


def size(text: str) -> int:
    """Bytes: 5GB, 500MB, 2GiB, or a number of them."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    number = float(found[1]) * UNITS[found[2] or ""] if found else 0.0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB, 500MB or 2GiB")
    return int(number)


if __name__ == "__main__":
    run_command(main)
