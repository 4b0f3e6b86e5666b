"""Initial weights in Hugging Face format, "hf:FOLDER" or "hf:ORGANIZATION/NAME[@REVISION]": validation and download,
the same on all ranks."""

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.hf.folder import CONFIG_FILE, PREFIX, ModelFolder, open_folder
from titanlite.hf.hub import HubModel, download, open_snapshot, parse_hub_name, pinned
from titanlite.models.family import Family
from titanlite.runtime.distributed import World
from titanlite.runtime.errors import ConfigError, Problem, UserError

KEY = "checkpoint.initial_load_path"
RULE = "hf:FOLDER, a model folder in the format of transformers, or hf:ORGANIZATION/NAME[@REVISION], a model on the hub"

_POLL_S = 0.2
_MAY_DIFFER = {"max_seq_len"}
"""Hyper-parameters that need not match, since they do not change what the model computes."""


def open_source(text: str) -> ModelFolder:
    """Open FOLDER, or download and open ORGANIZATION/NAME[@REVISION] from the hub. Raises UserError."""
    if text and Path(text).is_dir():
        return open_folder(text, Path(text))
    model = parse_hub_name(text)
    if model is None:
        raise UserError(f"{text!r} is neither a folder nor ORGANIZATION/NAME[@REVISION] on the hub")
    return open_snapshot(model, download(model))


def check_source(text: str, family: Family, hyper_parameters: Any) -> list[Problem]:
    """Check initial_load_path with local files only. text: including "hf:"."""
    where = text.removeprefix(PREFIX)
    path = Path(where)
    if where.startswith("~"):
        return [Problem(KEY, text, 'a path without "~", which is not expanded', f'write "{PREFIX}{path.expanduser()}"')]
    if not where or not path.is_dir():
        remedy = (
            f"there is no folder {path.absolute()}: fix the path (relative to the current folder) or the model name"
        )
        return [] if parse_hub_name(where) else [Problem(KEY, text, RULE, remedy)]
    try:
        folder = open_folder(text, path)
    except UserError as error:
        return [Problem(KEY, text, RULE, f"fix this folder, or choose another one: {error}")]
    return check_model(folder, family, hyper_parameters)


def check_model(folder: ModelFolder, family: Family, hyper_parameters: Any) -> list[Problem]:
    """One problem for each hyper-parameter of [model] that differs from the folder's model."""
    rule = f"that of {CONFIG_FILE} in {folder.name}"
    if folder.family.name != family.name:
        remedy = f'write family = "{folder.family.name}" in [model]'
        return [Problem("model.family", family.name, f"{rule}, {folder.family.name!r}", remedy)]
    problems = []
    for field in fields(hyper_parameters):
        ours, theirs = getattr(hyper_parameters, field.name), getattr(folder.hyper_parameters, field.name)
        if ours != theirs and field.name not in _MAY_DIFFER:
            value = str(theirs).lower() if isinstance(theirs, bool) else repr(theirs)
            remedy = f"write {field.name} = {value} in [model]"
            if field.name == "vocab_size":
                remedy += ", and use the folder's tokenizer: the embedding has one row for each of its tokens"
            problems.append(Problem(f"model.{field.name}", ours, f"{rule}, {value}", remedy))
    return problems


def fetch_source(
    text: str, family: Family, hyper_parameters: Any, world: World, store: dist.Store
) -> ModelFolder | None:
    """Open the folder with the initial weights on each rank's node, after a download if needed; None if `text` is "".

    All ranks call it before the process group exists, so that a long download does not cause a timeout. text:
    including "hf:"; only rank 0's value counts. Rank 0 resolves the commit on the hub; the first rank of each node
    downloads. Raises UserError on all ranks.
    """
    if world.rank == 0:
        store.set("import/source", json.dumps(_resolve(text)))
    source = _read(store, "import/source")
    if not source:
        return None
    if "folder" in source:
        folder = open_folder(text or PREFIX + source["folder"], Path(source["folder"]))
    else:
        model = HubModel(*source["model"])
        node = f"import/node of {world.rank - world.local_rank}"
        if world.local_rank == 0:
            store.set(node, json.dumps(_downloaded(model)))
        folder = open_snapshot(model, Path(_read(store, node)["path"]))
    problems = check_model(folder, family, hyper_parameters)
    if problems:
        raise ConfigError(problems)
    store.add("import/ranks", 1)
    while store.add("import/ranks", 0) < world.size:  # wait for the other nodes
        time.sleep(_POLL_S)
    return folder


def _resolve(text: str) -> dict[str, Any]:
    """Resolve initial_load_path to {folder}, {model}, {error}, or {} if empty, to be sent to all ranks."""
    where = text.removeprefix(PREFIX)
    if not text or Path(where).is_dir():
        return {"folder": where} if text else {}
    model = parse_hub_name(where)
    if model is None:
        return {"error": f"{KEY} = {text!r} is neither an existing folder nor a valid name of a model on the hub"}
    try:
        resolved = pinned(model)
    except UserError as error:
        return {"error": f"{KEY}: {error}"}
    return {"model": [resolved.repository, resolved.revision]}


def _downloaded(model: HubModel) -> dict[str, str]:
    try:
        return {"path": str(download(model))}
    except UserError as error:
        return {"error": f"{KEY}: {error}"}


def _read(store: dist.Store, key: str) -> dict[str, Any]:
    """Wait without a timeout for another rank's result in the store. Raises UserError if the result is an error."""
    while not store.check([key]):
        time.sleep(_POLL_S)
    answer: dict[str, Any] = json.loads(store.get(key))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
