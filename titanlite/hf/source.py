"""Initial weights in Hugging Face format, "hf:FOLDER" or "hf:ORGANIZATION/NAME[@REVISION]": validation and download,
the same on all ranks."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.hf.folder import CONFIG_FILE, PREFIX, ModelFolder, open_folder
from titanlite.hf.hub import HubModel, download, open_snapshot, parse_hub_name, pinned
from titanlite.models.family import Family
from titanlite.ranks.agreement import parse_shared
from titanlite.ranks.distributed import World
from titanlite.ranks.positions import late_error
from titanlite.runtime.errors import ConfigError, LateRanksError, Problem, UserError
from titanlite.runtime.retry import may_pass
from titanlite.runtime.waiting import parse_value, waiting

KEY = "checkpoint.initial_load_path"
RULE = "hf:FOLDER, a model folder in the format of transformers, or hf:ORGANIZATION/NAME[@REVISION], a model on the hub"

_POLL_S = 0.2
_PROGRESS = "progress"
"""Key in the store: a count that grows while a rank downloads."""
_ALL_READY = "all ready"
"""Key in the store: no rank downloads any more."""
_MAY_DIFFER = {
    *("max_seq_len", "balance_loss", "z_loss", "bias_rate", "base_dim", "base_layers"),
    *("init_std", "init_by_depth"),
}
"""Hyper-parameters that need not match: they do not change what the model computes at the start."""


def open_source(text: str) -> ModelFolder:
    """Open FOLDER, or download and open ORGANIZATION/NAME[@REVISION] from the hub. Raises UserError."""
    if text and Path(text).is_dir():
        return open_folder(text, Path(text))
    model = parse_hub_name(text)
    if model is None:
        raise UserError(f"{text!r} is neither a folder nor ORGANIZATION/NAME[@REVISION] on the hub")
    return open_snapshot(model, download(model))


def check_source(text: str, family: Family, hyper_parameters: Any, *, accepts_rope: bool = False) -> list[Problem]:
    """Check initial_load_path with local files only. text: including "hf:". accepts_rope: see check_model."""
    where = text.removeprefix(PREFIX)
    path = Path(where)
    if not where or not path.is_dir():
        remedy = (
            f"there is no folder {path.absolute()}: fix the path (relative to the current folder) or the model name"
        )
        return [] if parse_hub_name(where) else [Problem(KEY, text, RULE, remedy)]
    try:
        folder = open_folder(text, path)
    except UserError as error:
        return [Problem(KEY, text, RULE, f"fix this folder, or choose another one: {error}")]
    return check_model(folder, family, hyper_parameters, accepts_rope=accepts_rope)


def check_model(
    folder: ModelFolder, family: Family, hyper_parameters: Any, *, accepts_rope: bool = False
) -> list[Problem]:
    """One problem for each hyper-parameter of [model] that differs from the folder's model.

    accepts_rope: those of rotary embeddings, rope_*, may differ.
    """
    rule = f"that of {CONFIG_FILE} in {folder.name}"
    if folder.family.name != family.name:
        remedy = f'write family = "{folder.family.name}" in [model]'
        return [Problem("model.family", family.name, f"{rule}, {folder.family.name!r}", remedy)]
    problems = []
    for field in fields(hyper_parameters):
        ours, theirs = getattr(hyper_parameters, field.name), getattr(folder.hyper_parameters, field.name)
        is_rope = field.name.startswith("rope_")
        if field.name == "n_further_tokens" and not ours:
            continue  # the folder's are left out
        if ours != theirs and field.name not in _MAY_DIFFER and not (is_rope and accepts_rope):
            value = str(theirs).lower() if isinstance(theirs, bool) else repr(theirs)
            remedy = f"write {field.name} = {value} in [model]"
            if field.name == "vocab_size":
                remedy += ", and use the folder's tokenizer: the embedding has one row for each of its tokens"
            if is_rope:
                remedy += '; to extend the context: checkpoint.accept_changes = ["rope"]'
            problems.append(Problem(f"model.{field.name}", ours, f"{rule}, {value}", remedy))
    return problems


def fetch_source(
    text: str,
    family: Family,
    hyper_parameters: Any,
    world: World,
    store: dist.Store,
    timeout_s: int,
    *,
    accepts_rope: bool = False,
) -> ModelFolder | None:
    """Open the folder with the initial weights on each rank's node, after a download if needed; None if `text` is "".

    All ranks call it before the process group exists, so that a long download does not cause a timeout. text:
    including "hf:"; only rank 0's value counts. Rank 0 resolves the commit on the hub; the first rank of each node
    downloads. Raises UserError on all ranks, and LateRanksError if no rank makes progress for `timeout_s`.
    """
    store = dist.PrefixStore("import", store)
    source = _share(0, "source", lambda: _resolve(text), world, store, timeout_s)
    if source is None:
        return None
    if isinstance(source, str):
        folder = open_folder(text or PREFIX + source, Path(source))
    else:
        model = HubModel(*source)
        path = _share(world.local_ranks.start, "download", lambda: str(download(model)), world, store, timeout_s)
        folder = open_snapshot(model, Path(path))
        # Wait for the other nodes: a long download must not exceed the time limit of the next exchange.
        store.set(f"ready/{world.rank}", "")
        if store.add("ready", 1) == world.size:
            store.set(_ALL_READY, "")

        def late() -> list[int]:
            return [rank for rank in range(world.size) if not store.check([f"ready/{rank}"])]

        _wait(store, _ALL_READY, 0, lambda: late_error(store, world.rank, world.size, timeout_s, late), timeout_s)
    problems = check_model(folder, family, hyper_parameters, accepts_rope=accepts_rope)
    if problems:
        raise ConfigError(problems)
    return folder


def _resolve(text: str) -> str | tuple[str, str] | None:
    """Resolve initial_load_path to a folder, to (repository, revision), or to None if empty. Raises UserError."""
    where = text.removeprefix(PREFIX)
    if not text or Path(where).is_dir():
        return where if text else None
    model = parse_hub_name(where)
    if model is None:
        raise UserError(f"{text!r} is neither an existing folder nor a valid name of a model on the hub")
    resolved = pinned(model)
    return resolved.repository, resolved.revision


def _share(rank: int, name: str, work: Callable[[], Any], world: World, store: dist.Store, timeout_s: int) -> Any:
    """As share_from_rank_0, from one rank, and without a limit while its work makes progress; see _wait."""
    if world.rank == rank:
        with _progress(store):
            try:
                sent = {"result": work()}
            except UserError as error:
                sent = {"error": f"{KEY}: {error}", "may_pass": may_pass(error)}
            store.set(f"{name}/{rank}", json.dumps(sent))
    _wait(store, f"{name}/{rank}", rank, lambda: LateRanksError([rank], timeout_s), timeout_s)
    shared = parse_value(store.get(f"{name}/{rank}"), parse_shared)
    if shared is None:
        raise LateRanksError([rank], timeout_s)
    if "error" in shared:
        failed = UserError(shared["error"])
        failed.may_pass = shared["may_pass"]
        raise failed
    return shared["result"]


def _wait(store: dist.Store, key: str, first: int, late: Callable[[], LateRanksError], timeout_s: int) -> None:
    """Wait until the key is set. first: the first rank that may set it. Raises `late()` if no rank makes progress for
    `timeout_s`."""
    progress, end = 0, time.monotonic() + timeout_s
    with waiting(lambda: f"rank {first} or a later one, which downloads the model: see its log"):
        while not store.check([key]):
            if (count := store.add(_PROGRESS, 0)) != progress:
                progress, end = count, time.monotonic() + timeout_s
            elif time.monotonic() > end:
                raise late()
            time.sleep(_POLL_S)


@contextmanager
def _progress(store: dist.Store) -> Iterator[None]:
    """Count progress in the store, from a thread, while this process runs the block: requests to the hub may take long,
    but end."""
    done = threading.Event()

    def count() -> None:
        while not done.wait(_POLL_S):
            store.add(_PROGRESS, 1)

    thread = threading.Thread(target=count, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
