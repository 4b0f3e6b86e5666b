"""Whether an exported folder computes what the run's own model computes, before the folder gets its name."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.hf.folder import open_folder
from titanlite.models.family import LanguageModel
from titanlite.runtime.errors import UserError
from titanlite.runtime.memory import available_memory_bytes
from titanlite.tools.saved_run import SavedRun, empty_model

ROWS, SEQ_LEN = 2, 64
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}
"""Largest difference of two logits over the largest logit, by the dtype of the computation. transformers computes norms
and rotary tables in float32 also in a float64 model."""
_CPU = torch.device("cpu")
_TEXT = "The same text, 1 2 3,\n\tin the same tokens."


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which logits are compared: the weights are those of the folder, rounded as there. In bfloat16 itself, what two
    programs compute differs by as much as a mistake may."""
    return torch.promote_types(dtype, torch.float32)


def too_large(run: SavedRun, dtype: torch.dtype) -> str | None:
    """Why the comparison is left out where nobody has asked for it; None where two copies of the model fit."""
    count = sum(shape.numel() for shape in map(torch.Size, run.shapes().values()))
    needed, there = 2 * count * compute_dtype(dtype).itemsize, available_memory_bytes()
    if needed <= there:
        return None
    return f"two copies of the model take {needed / 2**30:,.1f} GiB, and {there / 2**30:,.1f} GiB are free"


def verify(run: SavedRun, folder: Path, dtype: torch.dtype) -> str:
    """What was compared and how far it agrees, in one line. Raises UserError where it does not."""
    compute = compute_dtype(dtype)
    length = min(SEQ_LEN, run.hyper_parameters.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.hyper_parameters.vocab_size, (ROWS, length), generator=generator)
    own = run.model(_CPU, dtype)
    _require_same_bits(own, folder)
    own = own.to(compute)
    own.init_buffers(_CPU)
    expected = _logits(own, tokens)
    del own
    by, found = _logits_of_folder(folder, compute, tokens)
    difference = float((found - expected).abs().max())
    relative = difference / max(float(expected.abs().max()), 1e-30)
    bound = BOUNDS[compute] if by.startswith("transformers") else 0.0
    said = (
        f"logits of the folder by {by} against those of the run's own model, {ROWS} x {length} tokens in "
        f"{str(compute).removeprefix('torch.')}: largest difference {difference:.2g}, {relative:.2g} of the largest "
        f"logit (bound {bound:.0e})"
    )
    if not relative <= bound:
        raise UserError(f"the folder is not the run's model, and is not kept: {said}")
    return said


def check_tokenizer(run: SavedRun, folder: Path) -> str | None:
    """A warning where transformers makes other tokens of a text than the run's own tokenizer; None: it does not, or
    there is no tokenizer or no transformers."""
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
    return f"transformers {transformers.__version__} makes other tokens of a text than the run's own tokenizer does"


def _require_same_bits(own: LanguageModel, folder: Path) -> None:
    """Logits of a few tokens say nothing of the others' embeddings. One tensor at a time is read."""
    found = open_folder(folder.name, folder)
    for name, parameter in own.named_parameters():
        there = torch.empty_like(parameter)
        found.fill_({name: there})
        if not torch.equal(there, parameter):
            raise UserError(f"the folder is not the run's model, and is not kept: {name} has other values there")


@torch.no_grad()
def _logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)
    return logits


@torch.no_grad()
def _logits_of_folder(folder: Path, compute: torch.dtype, tokens: Tensor) -> tuple[str, Tensor]:
    """(who has computed them, logits). By transformers where it is installed: its code knows nothing of ours."""
    if not _has_transformers():
        found = open_folder(folder.name, folder)
        model = empty_model(found.family, found.hyper_parameters, _CPU, compute).eval()
        found.fill_({name: parameter.data for name, parameter in model.named_parameters()})
        return "titanlite (transformers is not installed)", _logits(model, tokens)
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    chosen = {"dtype" if version >= (4, 56) else "torch_dtype": compute}
    talk: Any = transformers.utils.logging
    talk.disable_progress_bar()
    try:
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **chosen)
    except Exception as error:  # whatever it meets in a folder that is not right
        raise UserError(
            f"transformers {transformers.__version__} cannot load what was written, and the folder is not kept "
            f"(--no-verify, if that version is too old for the family): {error}"
        ) from None
    return f"transformers {transformers.__version__}", theirs.eval().to(compute)(tokens).logits


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None
