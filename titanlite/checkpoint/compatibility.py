"""Compare a checkpoint's facts and settings with those of the run that resumes from it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from titanlite.checkpoint.config import Changeable, another_run
from titanlite.checkpoint.dropped import remove_dropped
from titanlite.data.fingerprint import describe_difference, num_sources
from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import plugin_digests

# Remedy per fact that must be equal to resume.
_REMEDIES = {
    "model": "resume with the model of the checkpoint",
    "seq_len": "resume with the checkpoint's training.seq_len",
    "stages": (
        "resume with the training.stages that have begun by this step as they were (the first one is [training]); "
        "later ones may change"
    ),
    "dtype": "resume with the checkpoint's training.dtype",
    "optimizer": (
        "resume with the optimizers of the checkpoint (optimizer.name, momentum, state_dtype and groups), or start "
        "their state anew: --checkpoint.accept_changes '[\"optimizer\"]'"
    ),
    "num_streams": "resume with the checkpoint's data.num_streams: leave the key out",
    "bit_equal": (
        "resume with the checkpoint's training.bit_equal, rows of a microbatch (training.local_batch_size; with a "
        "pipeline parallelism.pp_microbatch_size) and threads of a rank (OMP_NUM_THREADS), or accept other bits: "
        "--checkpoint.accept_changes '[\"bit_equal\"]'"
    ),
    "streams_version": "resume with the checkpoint's data.stream_version: leave the key out",
    "imported_from": "an import holds weights only: start a new run from them, see the last line",
}
# Hyper-parameters that only the training of the model depends on: they may change.
_COEFFICIENTS = ("balance_loss", "z_loss", "bias_rate")
# Hyper-parameters that checkpoints of earlier versions lack, with what they stand for there.
MISSING = {"base_dim": 0, "base_layers": 0, "n_further_tokens": 0, "init_std": 0.02, "init_by_depth": True}
# The stage that [training] describes.
_FIRST = "from step 1"
_ACCEPTED = "accepted change since the checkpoint"
_REMOVED = (
    "a source cannot be removed, also not with checkpoint.accept_changes: keep it; with a small weight, and weights of "
    "the others, it is rarely used"
)
_FRESH = "start a new run from these weights: --checkpoint.initial_load_path FOLDER"


def check_facts(
    saved: Mapping[str, Any], now: Mapping[str, Any], accepted: Collection[Changeable], where: str, step: int
) -> list[str]:
    """Return one log line per accepted difference. Raises UserError with all other differences.

    saved, now: facts by name; a fact is a JSON value, compared recursively. where: the checkpoint, for messages. step:
    its own: stages of the training that begin later may differ.
    """
    lines, refused = [], []
    saved, now = _begun(saved, step), _begun(now, step)
    if _FIRST not in saved["stages"]:  # the run had no stages, or a titanlite before this fact
        now["stages"].pop(_FIRST, None)
    for name in sorted({*saved, *now}):
        accept = f"or accept the change: --checkpoint.accept_changes '[\"{name}\"]'"
        remedy = _REMEDIES.get(name, f"resume with the {name} of the checkpoint, {accept}")
        is_accepted = name in accepted
        if name == "data":
            before, after = saved.get(name, {}), now.get(name, {})
            found = [f"data: {line}" for line in describe_difference(before, after)]
            if num_sources(after) < num_sources(before):
                is_accepted, remedy = False, _REMOVED
        elif name == "model":
            found = [line for line in model_differences(saved, now) if not _is_coefficient(line, saved, now)]
            if any(line.startswith("model.bias_rate:") for line in found):
                remedy += "; a model.bias_rate above 0 may change, but the biases are in the checkpoint or not"
            rope = [line for line in found if line.startswith("model.rope_")]
            if "rope" in accepted:
                lines += [f"{_ACCEPTED}: {line}" for line in rope]
                found = [line for line in found if line not in rope]
            elif rope:
                remedy += '; to extend the context: checkpoint.accept_changes = ["rope"]'
        elif name == "bit_equal" and not {name} <= saved.keys() & now.keys():
            found = [f"training.bit_equal: {name in saved} in the checkpoint, {name in now} now"]
        elif name == "optimizer":
            found = optimizer_differences(saved.get(name), now.get(name))
        else:
            found = list(differences(saved.get(name), now.get(name), name))
        if not found:
            continue
        if is_accepted:
            lines += [f"{_ACCEPTED}: {line}" for line in found]
        else:
            refused += [*(f"  {line}" for line in found), f"    remedy: {remedy}"]
    if refused:
        raise UserError(
            f"cannot resume from {where}: the run's settings differ from the checkpoint's",
            *refused,
            f"  or {_FRESH} {another_run(where)}",
        )
    return lines


def _begun(facts: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The facts with only those stages of the training that have begun at this step. The batch of the first stage may
    change as long as it is the only one."""
    begun = {name: stage for name, stage in facts.get("stages", {}).items() if stage["from_step"] <= step}
    begun = {} if begun.keys() == {_FIRST} else begun
    return {**{name: fact for name, fact in facts.items() if name != "stages"}, "stages": begun}


def optimizer_differences(saved: Any, now: Any) -> list[str]:
    """One line per parameter, or pattern of names, whose optimizer differs. saved, now: see
    titanlite.optim.registry.kinds_of_state."""
    if not isinstance(saved, Mapping) and not isinstance(now, Mapping):
        return list(differences(saved, now, "optimizer"))
    sides = [side if isinstance(side, Mapping) else {"*": side} for side in (saved, now)]
    names = {name for side in sides for name in side if not _covers_another(name, sides)}
    before, after = ({name: _of(side, name) for name in sorted(names)} for side in sides)
    return list(differences(before, after, "optimizer"))


def _covers_another(pattern: str, sides: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a side has names, or narrower patterns, that the pattern matches."""
    return any(name != pattern and fnmatchcase(name, pattern) for side in sides for name in side)


def _of(side: Mapping[str, Any], name: str) -> Any:
    """The value of a name, or of the pattern that matches it."""
    return side.get(name, next((value for pattern, value in side.items() if fnmatchcase(name, pattern)), None))


def model_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per hyper-parameter of the model that differs. saved, now: facts of a manifest."""
    before, after = (with_missing(side)["model"] for side in (saved, now))
    return list(differences(before, after, "model"))


def with_missing(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a manifest, with the hyper-parameters that an earlier version did not have."""
    return {**facts, "model": {**MISSING, **facts.get("model", {})}}


def _is_coefficient(line: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a line of model_differences names a coefficient that may change. With a bias_rate of 0, the model has no
    biases, so it may not become 0 or begin."""
    key = line.removeprefix("model.").partition(":")[0]
    has_biases, needs_biases = (bool(side.get("model", {}).get("bias_rate")) for side in (saved, now))
    return key in _COEFFICIENTS and (key != "bias_rate" or has_biases == needs_biases)


def differences(saved: Any, now: Any, name: str) -> Iterator[str]:
    """Yield one line per differing value: "<name>: <saved> in the checkpoint, <now> now"."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in [*saved, *(key for key in now if key not in saved)]:
            yield from differences(saved.get(key), now.get(key), f"{name}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(now, list | tuple) and len(saved) == len(now):
        for index, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from differences(old, new, f"{name}.{index}")
    elif saved != now:
        yield f"{name}: {_shown(saved)} in the checkpoint, {_shown(now)} now"


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], logged: Collection[str]) -> list[str]:
    """Return one line per changed setting that affects the results of later steps.

    saved, now: resolved configurations, by section.
    """
    saved = {section: dict(values) for section, values in saved.items()}
    remove_dropped(saved)
    lines: list[str] = []
    for section, values in now.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if name in logged:
                lines += differences(saved.get(section, {}).get(key), value, name)
    before, after = (values.get("model", {}).get("overrides", {}) for values in (saved, now))
    for key in _COEFFICIENTS:
        lines += differences(before.get(key), after.get(key), f"model.{key}")
    earlier, later = (plugin_digests(values.get("job", {}).get("plugins", [])) for values in (saved, now))
    return [*lines, *differences(earlier, later, "job.plugins")]


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
