"""The report: header, table (row by row) and summary, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_lines
from titanlite.runtime.text import counted
from titanlite.tools.parity.compare import Result, combined_hash
from titanlite.tools.parity.layouts import ONE_PROCESS, Layout, Refusal
from titanlite.tools.parity.measure import Measurement, own_dtypes
from titanlite.tools.parity.verdict import FLOAT64_BOUND, FLOOR_EPS, MULTIPLE, dead_parameters, one_process_eps

COLUMNS = (
    "layout",
    "dtypes",
    "loss difference",
    "grad norm ratio",
    "worst parameter",
    "its error",
    "bound",
    "update error",
    "verdict",
)
AGREES = "agrees"
DIFFERS = "DIFFERS"


def short_dtypes(dtypes: Sequence[str]) -> str:
    """ "float64" if all dtypes are equal, else "parameters/compute/reduction"."""
    return dtypes[0] if len(set(dtypes)) == 1 else "/".join(dtypes)


def refusal_lines(refused: Sequence[Refusal]) -> Iterator[str]:
    """The reasons for refusals, each once, with its layouts."""
    by_reason: dict[str, list[str]] = {}
    for refusal in refused:
        reason = "; ".join(f"{problem.key} = {problem.value!r}: {problem.rule}" for problem in refusal.problems)
        by_reason.setdefault(reason, []).append(str(refusal.layout))
    for reason, names in by_reason.items():
        yield f"refused by the configuration's checks: {', '.join(names)}"
        yield f"    {reason}"


def head_lines(config: JobConfig, steps: int, references: Sequence[Measurement]) -> Iterator[str]:
    """A description of the reference."""
    training, reference = config.training, references[0]
    labels = training.global_batch_size * training.seq_len
    valid = ", ".join(str(step.num_valid) for step in reference.steps)
    yield (
        f"reference: one process, plain torch, float64; {counted(steps, 'step')} of "
        f"{counted(training.global_batch_size, 'sequence')} x {training.seq_len} tokens"
    )
    for line in stage_lines(config):
        yield f"           {line}"
    of_all = "" if config.training.stages else f" of {labels}"
    yield f"           valid labels per step, the others masked on purpose: {valid}{of_all}"
    losses = ", ".join(f"{step.loss:.6f}" for step in reference.steps)
    norms = ", ".join(f"{step.grad_norm:.6f}" for step in reference.steps)
    tokens = {name: value for step in reference.steps for name, value in step.rows.items()}
    yield f"           loss {losses}; grad norm {norms}; {len(reference.weights)} parameters"
    yield f"           sha256 of initial weights {combined_hash(reference.weights)}, of tokens {combined_hash(tokens)}"
    dead = dead_parameters(reference)
    if dead:
        yield f"note: untested, since they get no gradient: {len(dead)} parameters, {', '.join(dead)}"


def bound_lines(config: JobConfig) -> Iterator[str]:
    """The bounds on relative errors. config: resolved."""
    dtypes, loss = own_dtypes(config), config.loss.name
    yield f"bounds on relative errors: float64 {FLOAT64_BOUND:.0e}"
    own = f"{MULTIPLE:g} x the one-process run's own error + {FLOOR_EPS:g} eps; for the one-process run: "
    own += f"{one_process_eps(loss):g} eps"
    if set(dtypes) != {"float64"}:
        yield f"    {short_dtypes(dtypes)}, against float64: {own}"


OTHER_LOGITS = (
    "; one process differs, too: the reference computes the loss from the logits that the model returns without "
    "labels, and with labels the model's loss must be of the same logits (OutputLayer.transform changes both)"
)


class Table:
    """A table of fixed column widths, so that rows can be printed as they arrive."""

    def __init__(self, layouts: Sequence[Layout], own_dtypes: Sequence[str], parameters: Sequence[str]) -> None:
        layout = max(len(str(layout)) for layout in layouts)
        parameter = max(len(name) for name in (*parameters, COLUMNS[4]))
        dtypes = max(len("float64"), len(short_dtypes(own_dtypes)))
        self._widths = (max(layout, len("1x1x1x1")), dtypes, 15, 15, parameter, 9, 7, 12, len(DIFFERS))

    def head(self) -> list[str]:
        rule = "  ".join("-" * width for width in self._widths)
        return [self._row(COLUMNS), rule]

    def row(self, result: Result) -> list[str]:
        """The row of one layout in one pass; if it differs, a second line with the first difference."""
        verdict = result.verdict
        cells = (
            str(result.layout),
            short_dtypes(result.dtypes),
            f"{verdict.loss_difference:.1e}",
            f"{verdict.grad_norm_ratio:.9f}",
            verdict.parameter,
            f"{verdict.error:.1e}",
            f"{verdict.bound:.1e}",
            "-" if verdict.update_error is None else f"{verdict.update_error:.1e}",
            DIFFERS if verdict.first_difference else AGREES,
        )
        below = [f"    first difference: {verdict.first_difference}"] if verdict.first_difference else []
        return [self._row(cells), *below]

    def _row(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def routing_lines(results: Sequence[Result]) -> Iterator[str]:
    """The share of the positions that chose other experts than the reference, by dtypes; nothing without experts."""
    for dtypes in dict.fromkeys(result.dtypes for result in results):
        shares = [result.verdict.flipped for result in results if result.dtypes == dtypes]
        known = [share for share in shares if share is not None]
        if known:
            replayed = "" if set(dtypes) == {"float64"} else "; the experts of the reference computed"
            share = f"at most {max(known):.2%} of a step's positions differ from the reference"
            yield f"choices of experts, {short_dtypes(dtypes)}: {share}{replayed}"


def operand_lines(results: Sequence[Result]) -> Iterator[str]:
    """The largest share of an operand of float8 that differs from the reference; nothing without float8."""
    shares = [(str(result.layout), result.verdict.flipped_operands) for result in results]
    known = [(share, layout) for layout, share in shares if share is not None]
    if known:
        share, layout = max(known)
        yield (
            f"operands of float8: at most {share:.1e} of the elements of one differ from the reference ({layout}), "
            f"{known[0][0]:.1e} on one process; the operands of the reference computed"
        )


def last_line(results: Sequence[Result]) -> str:
    """The number of layouts that agree or differ, and the first that differs."""
    layouts = list(dict.fromkeys(result.layout for result in results))
    different = [result for result in results if result.verdict.first_difference]
    if not different:
        return f"all {len(layouts)} layouts agree with the reference"
    first = different[0]
    is_loss = first.layout == ONE_PROCESS and ", loss: " in str(first.verdict.first_difference)
    return (
        f"{len({result.layout for result in different})} of {len(layouts)} layouts differ; the first: {first.layout}, "
        f"{short_dtypes(first.dtypes)}: {first.verdict.first_difference}" + (OTHER_LOGITS if is_loss else "")
    )


def json_results(
    config_file: str, config: JobConfig, reference: Measurement, results: Sequence[Result], refused: Sequence[Refusal]
) -> Any:
    """The table's contents, and the error of every parameter in every step."""
    content = {
        "agree": all(result.verdict.first_difference is None for result in results),
        "config_file": config_file,
        "steps": len(reference.steps),
        "global_batch_size": config.training.global_batch_size,
        "seq_len": config.training.seq_len,
        "reference": {
            "weights": combined_hash(reference.weights),
            "steps": [
                {name: getattr(step, name) for name in ("loss", "grad_norm", "num_valid", "gradients")}
                for step in reference.steps
            ],
        },
        "layouts": [
            {"layout": str(result.layout), "dtypes": list(result.dtypes), **asdict(result.verdict)}
            for result in results
        ],
        "refused": [
            {"layout": str(refusal.layout), "problems": [asdict(problem) for problem in refusal.problems]}
            for refusal in refused
        ],
    }
    return _json_values(content)


def _json_values(value: Any) -> Any:
    """The value with non-finite numbers replaced by the strings "inf" and "nan"."""
    if isinstance(value, dict):
        return {key: _json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
