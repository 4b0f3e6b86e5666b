"""Where the weights of a run's start come from, "hf:FOLDER" or "hf:ORGANISATION/NAME[@REVISION]": checked, fetched,
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
RULE = "hf: and a model folder in the format of transformers, or hf: and ORGANISATION/NAME[@REVISION] on the hub"

_POLL_S = 0.2
_MAY_DIFFER = {"max_seq_len"}
"""Hyper-parameters of all families that change no number of a model: only how long sequences may become."""


def open_source(text: str) -> ModelFolder:
    """What FOLDER or ORGANISATION/NAME[@REVISION] means, downloaded where it is on the hub. Raises UserError."""
    if text and Path(text).is_dir():
        return open_folder(text, Path(text))
    model = parse_hub_name(text)
    if model is None:
        raise UserError(f"{text!r} is neither a folder nor ORGANISATION/NAME[@REVISION] on the hub")
    return open_snapshot(model, download(model))


def check_source(text: str, family: Family, hyper_parameters: Any) -> list[Problem]:
    """Problems of initial_load_path, as far as this machine's disk can tell. text: with its "hf:"."""
    where = text.removeprefix(PREFIX)
    path = Path(where)
    if where.startswith("~"):
        return [Problem(KEY, text, 'a path as it is; "~" has no meaning here', f'write "{PREFIX}{path.expanduser()}"')]
    if not where or not path.is_dir():
        remedy = f"there is no folder {path.absolute()}: mend the path (relative to the current folder), or the name"
        return [] if parse_hub_name(where) else [Problem(KEY, text, RULE, remedy)]
    try:
        folder = open_folder(text, path)
    except UserError as error:
        return [Problem(KEY, text, RULE, str(error))]
    return check_model(folder, family, hyper_parameters)


def check_model(folder: ModelFolder, family: Family, hyper_parameters: Any) -> list[Problem]:
    """A problem for each hyper-parameter in which [model] is not the folder's model."""
    rule = f"that of {CONFIG_FILE} in {folder.name}"
    if folder.family.name != family.name:
        remedy = f'write family = "{folder.family.name}" in [model]'
        return [Problem("model.family", family.name, f"{rule}, {folder.family.name!r}", remedy)]
    problems = []
    for field in fields(hyper_parameters):
        here, there = getattr(hyper_parameters, field.name), getattr(folder.hyper_parameters, field.name)
        if here != there and field.name not in _MAY_DIFFER:
            value = str(there).lower() if isinstance(there, bool) else repr(there)
            remedy = f"write {field.name} = {value} in [model]"
            if field.name == "vocab_size":
                remedy += ": the embedding has a row for each token of the folder's own tokenizer; use that one, too"
            problems.append(Problem(f"model.{field.name}", here, f"{rule}, {value}", remedy))
    return problems


def fetch_source(
    text: str, family: Family, hyper_parameters: Any, world: World, store: dist.Store
) -> ModelFolder | None:
    """The folder that the run starts from, on each rank's own node; all ranks call it alike, before they are a group,
    so that a long download runs into no timeout.

    text: with its "hf:", as rank 0 sees it: "" where the run starts elsewhere. Rank 0 asks the hub for the commit; the
    first rank of each node downloads. Raises UserError, on all ranks.
    """
    if world.rank == 0:
        store.set("import/source", json.dumps(_asked(text)))
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
    while store.add("import/ranks", 0) < world.size:  # nodes that are done wait for the others here
        time.sleep(_POLL_S)
    return folder


def _asked(text: str) -> dict[str, Any]:
    """What all ranks have to open, or the error."""
    where = text.removeprefix(PREFIX)
    if not text or Path(where).is_dir():
        return {"folder": where} if text else {}
    model = parse_hub_name(where)
    if model is None:
        return {"error": f"{KEY} = {text!r}: there is no such folder, and no model of the hub has such a name"}
    try:
        found = pinned(model)
    except UserError as error:
        return {"error": f"{KEY}: {error}"}
    return {"model": [found.repository, found.revision]}


def _downloaded(model: HubModel) -> dict[str, str]:
    try:
        return {"path": str(download(model))}
    except UserError as error:
        return {"error": f"{KEY}: {error}"}


def _read(store: dist.Store, key: str) -> dict[str, Any]:
    """What another rank has found, however long that takes. Raises UserError where that is an error."""
    while not store.check([key]):
        time.sleep(_POLL_S)
    answer: dict[str, Any] = json.loads(store.get(key))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
