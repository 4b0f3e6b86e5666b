"""Models on the Hugging Face hub: which commit a name means, and its files on this machine's disk."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.hf.folder import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    ModelFolder,
    open_folder,
    shard_of_tensors,
)
from titanlite.hf.safetensors import read_object
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.runtime.retry import http_status, is_transient, reason, retrying

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub. revision: a branch, a tag or a commit; "": the newest of its main branch."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse_hub_name(text: str) -> HubModel | None:
    """What ORGANISATION/NAME[@REVISION] means; None where the text has another form."""
    found = _NAME.fullmatch(text)
    return HubModel(found[1], found[2] or "") if found else None


def pinned(model: HubModel) -> HubModel:
    """With the commit that its revision stands for now. Raises UserError."""
    return HubModel(model.repository, _snapshot(model, [CONFIG_FILE]).name)


def download(model: HubModel) -> Path:
    """The model's folder in the hub's cache on this machine, with all that `open_folder` looks at. Raises UserError.

    What is there already is not downloaded again. Its entries are links into the cache.
    """
    path = _snapshot(model, [CONFIG_FILE, GENERATION_FILE, INDEX_FILE, *TOKENIZER_FILES])
    shards = [SINGLE_FILE]
    if (path / INDEX_FILE).exists():
        try:
            index = read_object((path / INDEX_FILE).read_bytes(), INDEX_FILE)
            shards = sorted(set(shard_of_tensors(index).values()))
        except UserError as error:
            raise UserError(f"hf:{model}: {error}") from None
    log.info("Model hf:%s: %d files of weights, from the hub or its cache", model, len(shards))
    _snapshot(model, shards)
    return path


def open_snapshot(model: HubModel, path: Path) -> ModelFolder:
    """What `download` has brought. Its entries may be links inside of the repository's own cache folder."""
    cache = path.parents[1]  # models--ORGANISATION--NAME/snapshots/COMMIT
    return open_folder(f"hf:{model}", path, cache if path.parent.name == "snapshots" else None)


def _snapshot(model: HubModel, names: Sequence[str]) -> Path:
    """The folder of that commit with those of the files that it has."""
    hub = _client()
    what = f"hf:{model}"

    def fetch() -> str:
        found: str = hub.snapshot_download(
            model.repository, revision=model.revision or None, allow_patterns=[_literally(name) for name in names]
        )
        return found

    try:
        return Path(retrying(what, fetch))
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds
        if http_status(error) in (401, 403, 404):
            remedy = "mend the name or the revision; HF_TOKEN where it is private or asks to be granted access"
        elif is_transient(error) or type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            remedy = "see whether this machine can reach the hub, or download the model and write hf:FOLDER"
        else:
            remedy = "mend the name, or download the model and write hf:FOLDER"
        raise UserError(
            f"{what} is no folder here, and cannot be had from the hub: {reason(error)}: {remedy}"
        ) from None


def _literally(name: str) -> str:
    """The pattern that this name alone fits."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _client() -> Any:
    """The library, imported when it is needed: it takes a second."""
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        raise UserError(
            "hf:ORGANISATION/NAME needs the Python package huggingface_hub: pip install huggingface_hub, or "
            '"titanlite[hf]"'
        ) from None
    utils: Any = huggingface_hub.utils
    utils.disable_progress_bars()
    return huggingface_hub
