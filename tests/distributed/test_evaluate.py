"""Evaluation of a saved run: numbers of its validation on every mesh, other data, no change to the run."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.distributed.program import (
    FAULTY,
    TEXT,
    Program,
    own_tracebacks,
    rows,
    start_command,
    start_program,
    write_text,
)
from tests.distributed.reference import SEQ_LEN
from tests.task_files import write_task
from titanlite.checkpoint.folder import step_folder
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import train_bpe
from titanlite.data.sources.token_table import TABLE_FILES
from titanlite.ranks.distributed import World
from titanlite.ranks.job_lock import job_lock
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.evaluate import conditions, evaluated_config, read_arguments, reading
from titanlite.tools.saved_run import open_run, require_names

pytestmark = pytest.mark.slow

HELD_OUT = "it says what it reads: né, the model!\n" * 9
ONE = World(0, 0, 1, "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `out`, a run of 4 steps with a final validation, and its data files. Validation keeps the sizes of
    the first stage, with the rotary embeddings of the last one, which also reads another source."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "held_out.txt").write_text(HELD_OUT)
    lengths = (1, 40, 3, 700, 16, 17, 90)
    (folder / "uneven.jsonl").write_text("".join(json.dumps({"text": (TEXT * 20)[:n]}) + "\n" for n in lengths))
    questions = [{"context": TEXT[:n], "choices": [" it", "né", " it is given"], "answer": n % 3} for n in range(7)]
    write_task(folder / "which.yaml", questions)
    write_task(folder / "next.yaml", [{"context": TEXT[:n], "answer": " it"} for n in (5, 40, 9)])
    start_program(
        folder,
        *write_text(folder),
        *("--data.sources.0.weight", "1", "--data.sources.0.name", "first"),
        *("--data.sources.1.weight", "0", "--data.sources.1.name", "later"),
        *("--data.sources.1.kind", "text", "--data.sources.1.path", str(folder / "text.txt")),
        *("--model.flavor", "debug"),
        *("--training.steps", "4", "--checkpoint.enable", "true", "--data.document_mask", "true"),
        *("--training.stages.0.from_step", "3", "--training.stages.0.seq_len", "32", "--data.num_streams", "16"),
        *("--training.stages.0.global_batch_size", "24", "--training.stages.0.rope_theta", "100.0"),
        *("--training.stages.0.weights", "{first = 1.0, later = 1.0}"),
        *("--validation.enable", "true", "--validation.sources.0.path", str(folder / "held_out.txt")),
        *("--validation.sources.0.kind", "text", "--validation.sources.0.name", "held out"),
        *("--validation.sources.1.kind", "jsonl", "--validation.sources.1.path", str(folder / "uneven.jsonl")),
        *("--validation.sources.1.name", "uneven"),
        *("--validation.tasks", json.dumps([str(folder / "which.yaml"), str(folder / "next.yaml")])),
    ).succeed()
    return folder


def start_evaluation(folder: Path, *arguments: str, ranks: int = 0) -> Program:
    """Start an evaluation of `out`, whose tasks are files; results go to result.json."""
    own = (str(folder / "out"), "--allow-import", "--json", str(folder / "result.json"))
    return start_command(folder, *own, *arguments, ranks=ranks, program=("-m", "titanlite.tools.evaluate"))


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """(modification time, size) of all files below a folder"""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.parametrize(
    ("ranks", "settings"), [(0, ()), (2, ("--parallelism.cp", "2")), pytest.param(3, (), marks=pytest.mark.soak)]
)
def test_numbers_are_those_of_the_validation_in_the_run(trained: Path, ranks: int, settings: tuple[str, ...]) -> None:
    """A job uses the folder meanwhile; its files do not change."""
    (row,) = (row for row in rows(trained / "out") if "validation/loss" in row)
    with job_lock(str(trained / "out"), 0, take_over=False, environment=os.environ):
        before = state_of(trained / "out")
        program = start_evaluation(trained, *settings, ranks=ranks).succeed()
        assert state_of(trained / "out") == before
    found = result(trained)
    assert (found["step"], found["num_streams"], found["document_mask"]) == (4, 16, True)
    assert found["all"]["num_valid"] == row["validation/num_valid"]
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found["all"][key] == pytest.approx(row[f"validation/{key}"], rel=1e-12, abs=0)
        for name in ("held out", "uneven"):
            right = row[f"validation/{key}/{name}"]
            assert found["sources"][name][key] == pytest.approx(right, rel=1e-12, abs=0)
    for name, scores in (("which", ("acc", "acc_norm", "acc_stderr")), ("next", ("acc", "perplexity"))):
        for key in (*scores, "bits_per_byte"):
            right = row[f"validation/task/{name}/{key}"]
            assert found["tasks"][name][key] == pytest.approx(right, rel=1e-6, abs=0)
    assert "held out" in program.output
    assert "uneven" in program.output


@pytest.mark.parametrize(
    ("key", "fact"), [("--data", "validation.sources.0: content"), ("--tokenizer", "tokenizer"), ("", "")]
)
def test_ranks_with_other_files_are_refused(trained: Path, tmp_path: Path, key: str, fact: str) -> None:
    """As on nodes that have files of their own at the same paths, or are given other paths."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "text.txt").write_text(HELD_OUT if folder == one or key != "--data" else HELD_OUT.upper())
    train_bpe(iter([TEXT] * 4), 280, one)
    train_bpe(iter([TEXT if key != "--tokenizer" else HELD_OUT] * 4), 280, other)
    each = [f"--data {folder / 'text.txt'} --tokenizer {folder}" for folder in (one, other)]
    environment = {"FAULTY_RANK": "1", "FAULT": "evaluate", "ARGUMENTS": "|".join(["", *each])}
    program = start_command(trained, str(trained / "out"), ranks=2, program=FAULTY, environment=environment)
    assert program.wait() == (1 if key else 0), program.output
    assert f"\n    {fact}: " in program.output or not key
    assert program.output.count("the ranks differ") == bool(key)
    assert own_tracebacks(program.output) == 0


def test_files_of_tasks_that_the_run_names_need_permission(trained: Path) -> None:
    require_names(trained, ("hellaswag",), "")
    with pytest.raises(UserError, match=r"out names files of tasks: '.*which.yaml'; .* add --allow-import, or leave"):
        require_names(trained / "out", ("hellaswag", str(trained / "which.yaml")), "leave it out")
    program = start_command(trained, str(trained / "out"), program=("-m", "titanlite.tools.evaluate"))
    assert program.wait() == 1
    assert "add --allow-import, or name each of them yourself, as --tasks FILE" in program.output


def test_other_data_match_plain_torch_and_the_bytes_of_the_text(trained: Path) -> None:
    start_evaluation(
        trained,
        *("--data", str(trained / "held_out.txt"), "--data.num_streams", "1", "--data.document_mask", "false"),
        *("--training.global_batch_size", "2", "--training.local_batch_size", "2"),
    ).succeed()
    found = result(trained)["all"]
    saved = open_run(trained / "out")
    tokenizer = saved.tokenizer()
    assert tokenizer is not None
    assert tokenizer.eos_id is not None
    ids = torch.tensor([*tokenizer.encode(HELD_OUT), tokenizer.eos_id])
    model = saved.model(torch.device("cpu"), torch.float64)
    loss_sum = 0.0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, SEQ_LEN):
            window = ids[begin : begin + SEQ_LEN + 1]
            loss_sum += float(functional.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    assert found["num_valid"] == len(ids) - 1
    assert found["loss"] == pytest.approx(loss_sum / (len(ids) - 1), rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(loss_sum / (len(ids) - 1)), rel=1e-12)
    first = len(tokenizer.decode([int(ids[0])]).encode())  # not predicted
    num_bytes = len(HELD_OUT.encode()) - first
    assert found["num_bytes"] == num_bytes
    assert found["bits_per_byte"] == pytest.approx(loss_sum / math.log(2) / num_bytes, rel=1e-12)


def test_bad_row_stops_all_ranks_with_one_message(trained: Path) -> None:
    (trained / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    program = start_evaluation(trained, "--data", str(trained / "bad.jsonl"), ranks=2)
    assert program.wait() == 1
    assert program.output.count("bad.jsonl, line 2: ") == 1
    assert own_tracebacks(program.output) == 0


def configured(folder: Path, *arguments: str, size: int = 1, has_tokenizer: bool = True) -> JobConfig:
    options, overrides = read_arguments([str(folder), *arguments])
    return evaluated_config(open_run(folder), options, overrides, World(0, 0, size, "cpu"), has_tokenizer=has_tokenizer)


def config_error(folder: Path, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        configured(folder, *arguments)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def test_invalid_arguments_raise_config_errors(trained: Path, tmp_path: Path) -> None:
    run = trained / "out"
    assert "no regular file matches" in config_error(run, "--data", str(tmp_path / "nowhere.txt"))
    assert "these are of no known kind" in config_error(run, "--data", str(trained / "config.toml"))
    assert "text and jsonl" in config_error(run, "--data", str(trained))
    assert "--steps = 0" in config_error(run, "--steps", "0")
    assert "--json = " in config_error(run, "--json", str(tmp_path / "nowhere" / "file"))
    assert "  model.dim\n    rule:   a key of a section" in config_error(run, "--model.dim", "3")
    assert "data.packing = 'most'" in config_error(run, "--data.packing", "most")
    assert "validation.sources.0.path = ''" in config_error(run, "--validation.sources.0.kind", "jsonl")
    assert "model.max_seq_len" in config_error(run, "--training.seq_len", "1000000")
    assert "parallelism.tp = 2" in config_error(run, "--parallelism.tp", "2")
    assert "at least 1 for an evaluation" in config_error(run, "--training.local_batch_size", "-1")
    assert configured(run, "--validation.enable", "false").validation.enable


def test_settings_of_the_run_must_fit_the_number_of_processes(trained: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(trained / "out", size=17)
    assert caught.value.problems
    for problem in caught.value.problems:
        if problem.key.startswith(("data.", "training.")):
            assert problem.remedy == (
                f"it is the run's value: use another number of processes, or give --{problem.key} for this evaluation"
            )


def test_float8_may_differ_from_that_of_the_run(trained: Path) -> None:
    saved = open_run(trained / "out")
    found = [conditions(configured(trained / "out", *each), saved) for each in ((), ("--float8.recipe", "rowwise"))]
    assert found[1] == found[0] | {"float8": "rowwise (ceil)"}
    assert "float8" not in found[0]


def test_requested_data_replace_the_validation_sources_of_the_run(trained: Path, tmp_path: Path) -> None:
    run = trained / "out"
    named = configured(run, "--data", str(trained / "unev*.jsonl"), "--data", str(trained / "text.txt"), "--steps", "3")
    assert [source.kind for source in named.validation.sources] == ["jsonl", "text"]
    assert named.validation.steps == 3
    by_key = configured(run, "--validation.sources.0.kind", "text", "--validation.sources.0.path", str(trained))
    assert [source.name for source in by_key.validation.sources] == [""]
    with_key = configured(run, "--data", str(trained / "text.txt"), "--validation.sources.0.document", "line")
    assert with_key.validation.sources[0].document == "line"
    assert [named.validation.tasks, len(configured(run).validation.tasks)] == [(), 2]
    asked = configured(run, "--tasks", str(trained / "next.yaml")).validation
    assert (asked.sources, asked.tasks) == ((), (str(trained / "next.yaml"),))
    assert "write a YAML with `dataset_path: json`" in config_error(run, "--tasks", str(trained / "which.jsonl"))
    assert "there is no such file" in config_error(run, "--tasks", str(trained / "none.yaml"))
    # Needs neither the training data nor write access.
    shutil.copytree(run, tmp_path / "moved")
    assert configured(tmp_path / "moved", size=2).parallelism.dp_shard == -1


def test_missing_sources_or_tokenizer_raise_config_errors(trained: Path) -> None:
    saved = open_run(trained / "out")
    saved.manifest.config["validation"] |= {"sources": [], "tasks": []}
    options, overrides = read_arguments([str(trained / "out")])
    with pytest.raises(
        ConfigError, match=r"--data = ''\n.*neither validation.sources nor validation.tasks\n.*give --data"
    ):
        evaluated_config(saved, options, overrides, ONE, has_tokenizer=True)
    with pytest.raises(ConfigError, match=r"--tasks = .*\n.*not without a tokenizer"):
        configured(trained / "out", "--tasks", str(trained / "next.yaml"), has_tokenizer=False)
    with pytest.raises(ConfigError, match=r"validation\.sources\.0\.kind = 'text'\n.*has a tokenizer"):
        configured(trained / "out", "--data", str(trained / "text.txt"), has_tokenizer=False)


def test_run_on_tokens_needs_a_tokenizer_argument(trained: Path) -> None:
    saved = open_run(trained / "out")
    tokenizer = saved.manifest.config["tokenizer"]["path"]
    saved.manifest.config["tokenizer"]["path"] = ""
    saved.manifest.config["data"]["sources"] = [{"kind": "tokens", "path": "anywhere"}]
    for arguments in ((), ("--tokenizer", tokenizer)):
        options, overrides = read_arguments([str(trained / "out"), "--data", str(trained / "text.txt"), *arguments])
        if arguments:
            assert evaluated_config(saved, options, overrides, ONE, has_tokenizer=True).tokenizer.path == tokenizer
        else:
            with pytest.raises(ConfigError, match=r"remedy: use token files, or give --tokenizer PATH"):
                evaluated_config(saved, options, overrides, ONE, has_tokenizer=False)


def test_what_only_concerns_the_training_is_not_checked(trained: Path) -> None:
    """Token files that it read, and ranks that it traced, do not limit the settings of an evaluation."""
    saved = open_run(trained / "out")
    saved.manifest.config["data"]["sources"] = [{"kind": "tokens", "path": "anywhere"}]
    saved.manifest.config["profiling"] |= {"enable_trace": True, "interval": 9, "wait": 0, "warmup": 0, "ranks": [5]}
    words = [str(trained / "out"), "--data.packing", "none", "--data"]
    options, overrides = read_arguments([*words, str(trained / "text.txt")])
    assert evaluated_config(saved, options, overrides, ONE, has_tokenizer=True).data.packing == "none"
    np.save(trained / "ids.npy", np.zeros(99, np.uint16))
    options, overrides = read_arguments([*words, str(trained / "ids.npy")])
    with pytest.raises(ConfigError, match=r"not valid for token files \(validation.sources.0\)") as caught:
        evaluated_config(saved, options, overrides, ONE, has_tokenizer=True)
    assert len(caught.value.problems) == 1


def test_checkpoint_deleted_while_reading_is_reported(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "out", tmp_path / "out")
    saved = open_run(tmp_path / "out")
    assert saved.path == step_folder(tmp_path / "out" / "checkpoint", 4)
    shutil.rmtree(saved.path)
    with pytest.raises(UserError, match=r"step-4 was deleted while it was being read"), reading(saved.path):
        saved.model(torch.device("cpu"), torch.float64)


COUNTING = """
import os
import sys
from titanlite.tools import evaluate

opens = []
sys.addaudithook(lambda event, given: opens.append(given) if event == "open" and "/many/" in str(given[0]) else None)


def connected(*given, original=evaluate.init_process_group):
    print(f"rank {os.environ['RANK']} has opened {len(opens)} files", flush=True)
    return original(*given)


evaluate.init_process_group = connected
evaluate.main(sys.argv[1:])
"""


def test_one_rank_of_a_node_looks_at_many_files(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for n in range(TABLE_FILES + 1):
        np.save(tmp_path / "many" / f"{n}.npy", np.arange(SEQ_LEN + 1, dtype=np.uint16) % 8)
    (tmp_path / "counting.py").write_text(COUNTING)
    arguments = (str(trained / "out"), "--data", str(tmp_path / "many"), "--data.document_mask", "false")
    program = start_command(tmp_path, *arguments, ranks=2, program=(str(tmp_path / "counting.py"),)).succeed()
    opened = {int(rank): int(count) for rank, count in re.findall(r"rank (\d) has opened (\d+) files", program.output)}
    assert opened[0] > TABLE_FILES
    assert opened[1] == 0


KILLED = """
import os
import signal
import sys
import time
from titanlite.tools import evaluate
from titanlite.evaluation.evaluator import Evaluator

killed = os.environ["RANK"] == "1"
Evaluator._totals_of = lambda *_: os.kill(os.getpid(), signal.SIGKILL) if killed else time.sleep(100)
evaluate.main(sys.argv[1:])
"""


@pytest.mark.soak  # default suite: of a training, in test_train_failures.py
def test_a_rank_that_is_killed_is_named(trained: Path, tmp_path: Path) -> None:
    """The other rank computes when the launcher ends it."""
    (tmp_path / "killed.py").write_text(KILLED)
    program = start_command(tmp_path, str(trained / "out"), ranks=2, program=(str(tmp_path / "killed.py"),))
    assert program.wait() == 1
    messages = [line for line in program.output.splitlines() if line.startswith("titanlite: ")]
    assert len(messages) == 1, program.output
    assert re.match(r"titanlite: rank 1 on \S+: no heartbeat, in step 4 \(evaluating\): killed", messages[0])
    assert own_tracebacks(program.output) == 0
    assert not (trained / "out" / "faults").exists()
