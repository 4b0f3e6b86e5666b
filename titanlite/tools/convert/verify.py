"""Verify that an exported folder computes the logits of the run's model, before the folder gets its final name."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.generation.model import empty_model
from titanlite.hf.folder import open_folder
from titanlite.models.family import FAMILIES, Family, LanguageModel, saved_tensors
from titanlite.runtime.errors import UserError
from titanlite.runtime.memory import available_memory_bytes
from titanlite.runtime.plugins import is_registered
from titanlite.tools.saved_run import SavedRun

ROWS, SEQ_LEN = 2, 64
MOST_OF_WINDOW = 4096 + SEQ_LEN
"""Positions of the row of a model whose attention has windows: SEQ_LEN more than the largest, but at most this many."""
OF_VARIANT = 1, 2048
"""Rows, and at most so many tokens of training.seq_len, of a model whose attention may have a window, for example."""
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}
"""Bound on the largest difference of two logits, relative to the largest logit, by compute dtype. transformers computes
norms and rotary tables in float32 even in a float64 model."""
_CPU = torch.device("cpu")
_TEXT = "The same text, 1 2 3,\n\tin the same tokens."


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits are compared: at least float32, with weights rounded to `dtype` as in the folder. In
    bfloat16, two correct programs differ by as much as a correct and a wrong one."""
    return torch.promote_types(dtype, torch.float32)


def copies_bytes(run: SavedRun, dtype: torch.dtype) -> int:
    """Bytes of two copies of the model."""
    return 2 * sum(map(math.prod, run.shapes().values())) * compute_dtype(dtype).itemsize


def too_large(run: SavedRun, dtype: torch.dtype) -> str | None:
    """Why the comparison is skipped without --verify; None if two copies of the model fit in memory."""
    needed, available = copies_bytes(run, dtype), available_memory_bytes()
    if needed <= available:
        return None
    return f"two copies of the model take {needed / 2**30:,.1f} GiB, and {available / 2**30:,.1f} GiB are free"


def format_owner(family: Family) -> str | None:
    """The family whose hugging_face a registered one has kept, with a `build` of its own; None: its format is its own.
    Only the comparison of logits shows whether both compute the same."""
    others = FAMILIES.values() if is_registered(FAMILIES, family.name) else ()
    kept = (each.name for each in others if each.hugging_face is family.hugging_face and each.build is not family.build)
    return next(kept, None)


def largest_window(run: SavedRun) -> int:
    """Positions of the largest window of the model's attention; 0: none."""
    return max(getattr(run.hyper_parameters, "windows", ()), default=0)


def compared_tokens(run: SavedRun, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, tokens of each) of the comparison of logits: more than a window has, as far as memory holds their logits
    beside two copies of the model."""
    rows, length = ROWS, SEQ_LEN
    if format_owner(run.family) is not None:
        rows, length = OF_VARIANT[0], min(OF_VARIANT[1], run.seq_len)
    elif (window := largest_window(run)) >= length:
        # both logits and their difference
        of_token = 3 * run.hyper_parameters.vocab_size * compute_dtype(dtype).itemsize
        fitting = (available_memory_bytes() - copies_bytes(run, dtype)) // of_token
        rows, length = 1, max(min(window + SEQ_LEN, MOST_OF_WINDOW, fitting), SEQ_LEN)
    return rows, min(length, run.hyper_parameters.max_seq_len)


@torch.no_grad()
def verify(run: SavedRun, folder: Path, dtype: torch.dtype) -> str:
    """Compare the folder with the run; returns a one-line summary. Raises UserError if they differ."""
    compute = compute_dtype(dtype)
    rows, length = compared_tokens(run, dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.hyper_parameters.vocab_size, (rows, length), generator=generator)
    own = run.model(_CPU, dtype)
    _require_same_bits(own, folder)
    own = own.to(compute)
    parameters = {name for name, _ in own.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in saved_tensors(own).items() if name not in parameters}
    own.init_buffers(_CPU)
    for name, tensor in saved_tensors(own).items():
        if name in buffers:
            tensor.copy_(buffers[name])
    expected = own(tokens)
    del own
    by, found = _logits_of_folder(folder, compute, tokens)
    difference = float((found - expected).abs().max())
    relative = difference / max(float(expected.abs().max()), 1e-30)
    bound = BOUNDS[compute] if by.startswith("transformers") else 0.0
    summary = (
        f"logits of the folder (by {by}) and of the run differ by at most {difference:.2g}, {relative:.2g} of the "
        f"largest logit (bound {bound:.0e}), on {rows} x {length} tokens in {str(compute).removeprefix('torch.')}"
    )
    if (window := largest_window(run)) >= length:
        summary += f"; a window of {window:,} positions is longer, and was not compared"
    if not relative <= bound:
        name, architecture = run.family.name, run.family.exported.architecture
        advice = "Try another version of transformers, or --dtype float64; --no-verify exports without this comparison"
        if is_registered(FAMILIES, name):
            advice = (
                f"The registered family {name!r} computes something else than {architecture} if --dtype float64 fails, "
                "too: give it a hugging_face that fits, or None"
            )
        raise UserError(f"the export failed: {summary}; the exported folder was deleted. {advice}")
    return summary


def check_tokenizer(run: SavedRun, folder: Path) -> str | None:
    """A warning if transformers tokenizes a text differently from the run's tokenizer; None if the tokens agree, or if
    the tokenizer or transformers is missing."""
    tokenizer = run.tokenizer()
    if tokenizer is None or not _has_transformers():
        return None
    import transformers

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = theirs(_TEXT, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the library raises many kinds
        return f"transformers {transformers.__version__} cannot load the tokenizer: {error}"
    if list(ids) == tokenizer.encode(_TEXT):
        return None
    return f"transformers {transformers.__version__} tokenizes a text differently from the run's own tokenizer"


def _require_same_bits(own: LanguageModel, folder: Path) -> None:
    """Raise UserError if a parameter is not bitwise equal. The logits of a few tokens do not cover all embeddings.

    Reads one tensor at a time.
    """
    found = open_folder(folder.name, folder)
    tensors = saved_tensors(own)
    for name in found.tensors:
        written = torch.empty_like(tensors[name])
        found.fill_({name: written})
        if not torch.equal(written, tensors[name]):
            raise UserError(
                f"the export failed: values of {name} in the folder differ from the run's; the exported folder was "
                "deleted. Check the disk, and export again"
            )


def _logits_of_folder(folder: Path, compute: torch.dtype, tokens: Tensor) -> tuple[str, Tensor]:
    """(program that computed them, logits). Uses transformers (4.56 or newer) if installed, as it shares no code with
    titanlite."""
    found = open_folder(folder.name, folder)
    if not _has_transformers():
        model = empty_model(found.family, found.hyper_parameters, _CPU, compute).eval()
        tensors = saved_tensors(model)
        found.fill_({name: tensors[name] for name in found.tensors})
        return "titanlite (transformers is not installed)", model(tokens)
    import transformers

    library_logging: Any = transformers.utils.logging
    library_logging.disable_progress_bar()
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()  # else it lists the tensors of layers that predict further tokens
    try:
        # its default for experts does not compute in float64
        options = {"experts_implementation": "eager"} if getattr(found.hyper_parameters, "n_experts", 1) > 1 else {}
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=compute, **options
        )
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"transformers {transformers.__version__} cannot load the exported folder, which was deleted "
            f"(use --no-verify if that version is too old for the family): {error}"
        ) from None
    finally:
        library_logging.set_verbosity(verbosity)
    return f"transformers {transformers.__version__}", theirs.eval().to(compute)(tokens).logits


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None
