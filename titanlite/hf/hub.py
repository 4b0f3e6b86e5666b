"""Models on the Hugging Face hub: resolution of revisions to commits, and download into the local cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES
from titanlite.hf.folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, ModelFolder, open_folder, shard_of_tensors
from titanlite.hf.generation_defaults import GENERATION_FILE
from titanlite.hf.safetensors import read_object
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.runtime.retry import http_status, is_transient, reason, retrying
from titanlite.runtime.waiting import waiting

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub. revision: a branch, a tag or a commit; "": the main branch."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse_hub_name(text: str) -> HubModel | None:
    """Parse ORGANIZATION/NAME[@REVISION]; None if the text has another form."""
    match = _NAME.fullmatch(text)
    return HubModel(match[1], match[2] or "") if match else None


def pinned(model: HubModel) -> HubModel:
    """The model with its revision resolved to the current commit. Raises UserError."""
    return HubModel(model.repository, _snapshot(model, [CONFIG_FILE]).name)


def download(model: HubModel) -> Path:
    """Download the files that `open_folder` reads; return the model's folder in the local cache. Raises UserError.

    Cached files are not downloaded again. The entries of the folder are links into the cache.
    """
    path = _snapshot(model, [CONFIG_FILE, GENERATION_FILE, INDEX_FILE, *TOKENIZER_FILES], f"{TEMPLATES}/*.jinja")
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
    """Open the folder that `download` returned. Its entries may be links within the repository's cache folder."""
    cache = path.parents[1]  # models--ORGANIZATION--NAME/snapshots/COMMIT
    return open_folder(f"hf:{model}", path, cache if path.parent.name == "snapshots" else None)


def _snapshot(model: HubModel, names: Sequence[str], *patterns: str) -> Path:
    """Download the files `names` and those of `patterns`, if they exist; return the folder of the model's commit in the
    cache."""
    hub = _client()
    title = f"hf:{model}"

    def fetch() -> str:
        folder: str = hub.snapshot_download(
            model.repository,
            revision=model.revision or None,
            allow_patterns=[*(_escaped(name) for name in names), *patterns],
        )
        return folder

    try:
        with waiting(lambda: f"{title}, which this or another process downloads: without a network, write hf:FOLDER"):
            return Path(retrying(title, fetch))
    except UserError:
        raise
    except Exception as error:  # the library raises many types
        if http_status(error) in (401, 403, 404):
            remedy = "fix the name or the revision; for a private or gated model set HF_TOKEN"
        elif is_transient(error) or type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            remedy = "check the connection to the hub, or download the model and write hf:FOLDER"
        else:
            remedy = "fix the name, or download the model and write hf:FOLDER"
        raise UserError(
            f"{title} is not a local folder, and cannot be downloaded from the hub: {reason(error)}: {remedy}"
        ) from None


def _escaped(name: str) -> str:
    """A pattern that matches only `name`."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _client() -> Any:
    """Import huggingface_hub, which takes a second, when a model of the hub is needed."""
    import huggingface_hub
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    utils.disable_progress_bars()
    return huggingface_hub
