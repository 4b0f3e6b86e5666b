"""titanlite from Python: runs in one process, what they restore, and that they do what the commands do."""

import gc
import json
import logging
import math
import os
import resource
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.distributed.program import CONFIG, write_text
from tests.distributed.reference import TOKENS
from tests.task_files import write_task
from titanlite.api import AnyRun, TrainedRun
from titanlite.config.toml import dump_config
from titanlite.ranks import signals
from titanlite.runtime.errors import ConfigError, UsageError, UserError
from titanlite.storage.config import StorageConfig
from titanlite.tools import evaluate
from titanlite.tools.convert.__main__ import main as convert
from titanlite.tools.generate.__main__ import main as generate
from titanlite.train import Trainer

SAVES = {"checkpoint.enable": True, "checkpoint.interval": 100}
REDISTRIBUTION = "torch.distributed.tensor._redistribute"
EARLIER_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., TrainedRun]:
    """train(folder, overrides): run CONFIG, 6 steps in well under a second."""
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)

    def run(folder: str = "out", overrides: dict[str, Any] | None = None) -> TrainedRun:
        return titanlite.run(config, {"job.dump_folder": tmp_path / folder, **(overrides or {})})

    return run


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run on text, with a tokenizer and checkpoints."""
    folder = tmp_path_factory.mktemp("spoken")
    (folder / "config.toml").write_text(CONFIG)
    write_text(folder)
    text = {"kind": "text", "path": folder / "text.txt"}
    settings = {"tokenizer.path": folder, "model.vocab_size": 300, "model.max_seq_len": 128, "data.sources": [text]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLITE_CACHE", str(folder / "cache"))
        return titanlite.run(folder / "config.toml", {"job.dump_folder": folder / "out", **settings, **SAVES})


@pytest.fixture
def in_step_3(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is called in the third step of each run. Empty at first."""
    actions: list[Callable[[], object]] = []

    def train_step(self: Trainer, batches: Any) -> Any:
        for action in actions if self.step == 2 else ():
            action()
        return original(self, batches)

    original = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", train_step)
    return actions


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Threads of earlier tests in this process may end during any later one."""
    EARLIER_THREADS.update(threading.enumerate())


@pytest.fixture(autouse=True)
def modules_stay_frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections of runs do not visit all modules, which takes half a second each."""
    if "unusual" not in request.fixturenames:
        monkeypatch.setattr(gc, "unfreeze", lambda: None)
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)


def settings_of_the_process() -> dict[str, Any]:
    log = logging.getLogger("titanlite")
    for thread in threading.enumerate():
        if thread.name == "titanlite-waiting":  # it has been told to end
            thread.join(10)
    threads = {thread.name for thread in threading.enumerate() if thread not in EARLIER_THREADS} - {"tqdm_monitor"}
    return {
        "environment": dict(os.environ),
        "handlers": {number: signal.getsignal(number) for number in (*signals.STOP_SIGNALS, signal.SIGALRM)},
        "log": (log.handlers[:], log.level, log.propagate, logging.getLogger(REDISTRIBUTION).level),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "torch": (torch.get_default_dtype(), torch.get_deterministic_debug_mode(), torch.is_grad_enabled()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "draws": torch.get_rng_state().tolist(),
        "groups": dist.is_initialized(),
        "garbage": (gc.isenabled(), gc.get_freeze_count() > 0),
        "warnings": warnings.filters[:],
        "threads": (threading.excepthook, threads),
        "hook": sys.excepthook,
        "folder": os.getcwd(),
    }


@pytest.fixture
def unusual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings that a notebook may have, and a run must not be changed by."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    torch.manual_seed(5)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.set_default_dtype(torch.bfloat16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    with torch.no_grad():
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    torch.set_default_dtype(torch.float32)


def losses(run: TrainedRun) -> list[float]:
    return [row["loss"] for row in run.metrics()]


@pytest.mark.slow
@pytest.mark.usefixtures("unusual")
def test_runs_have_the_same_numbers_and_leave_the_process_as_it_was(
    train: Callable[..., TrainedRun], in_step_3: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = settings_of_the_process()
    inside: list[torch.dtype] = []
    in_step_3.append(lambda: inside.append(torch.get_default_dtype()))
    in_step_3.append(lambda: logging.getLogger(REDISTRIBUTION).setLevel(logging.ERROR))  # as samples do
    first = train("first", {"metrics.loggers": ["jsonl", "tensorboard", "console"], "debug.deterministic": True})
    assert settings_of_the_process() == before
    assert inside == [torch.float32]
    assert "Done: 6 steps" in capsys.readouterr().out
    other = train("other", {"model.n_layers": 1, "optimizer.name": "SGD", "training.dtype": "float32"})
    in_step_3.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("failed", SAVES)
    assert settings_of_the_process() == before
    in_step_3.clear()
    second = train("second")
    assert losses(first) == losses(second) != losses(other)
    assert (second.step, second.ended, second.loss) == (6, "finished", losses(second)[-1])


@pytest.mark.soak
@pytest.mark.filterwarnings("default")  # Dynamo touches what is deprecated
def test_any_number_of_models_is_compiled(train: Callable[..., TrainedRun]) -> None:
    """torch compiles one piece of code for a limited number of models."""
    for dim in (32, 40):
        settings = {"compile.enable": True, "compile.backend": "eager", "training.steps": 1, "model.dim": dim}
        with torch._dynamo.config.patch(recompile_limit=1):
            assert train(f"{dim}", settings).ended == "finished"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_saves_the_run_which_then_resumes(
    train: Callable[..., TrainedRun], in_step_3: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = train("undisturbed", SAVES)
    before = signal.getsignal(signal.SIGINT)
    in_step_3.append(interrupt)
    stopped = train("out", SAVES)
    in_step_3.clear()
    assert (stopped.ended, stopped.loss) == ("stopped", losses(stopped)[-1])
    assert 3 <= stopped.step < 6
    assert signal.getsignal(signal.SIGINT) is before
    capsys.readouterr()
    resumed = train("out", SAVES)
    assert f"step {stopped.step}" in capsys.readouterr().out
    assert losses(resumed) == losses(undisturbed)
    again = train("out", SAVES)  # as when a cell of a notebook is run again
    assert (again.ended, again.step, again.loss) == ("finished", 6, losses(undisturbed)[-1])


@pytest.mark.slow
def test_ctrl_c_without_checkpoints_and_a_second_one_raise(
    train: Callable[..., TrainedRun], in_step_3: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings_of_the_process()
    in_step_3.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert settings_of_the_process() == before
    monkeypatch.setattr(signals, "SAME_SIGNAL_S", -1.0)
    in_step_3.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train("saving", SAVES)
    assert settings_of_the_process() == before


@pytest.mark.slow
def test_own_handlers_of_the_program_are_kept(
    train: Callable[..., TrainedRun], in_step_3: list[Callable[[], object]]
) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        in_step_3.append(lambda: signal.raise_signal(signal.SIGTERM))
        assert train("out", SAVES).ended == "finished"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


@pytest.mark.slow
def test_a_thread_trains_and_another_run_is_refused_meanwhile(
    train: Callable[..., TrainedRun], in_step_3: list[Callable[[], object]]
) -> None:
    refused: list[str] = []

    def run_another() -> None:
        with pytest.raises(UserError) as error:
            titanlite.run("quickstart")
        refused.append(str(error.value))

    in_step_3.append(run_another)
    found: list[TrainedRun] = []
    thread = threading.Thread(target=lambda: found.append(train()))
    thread.start()
    thread.join()
    assert found[0].ended == "finished"
    assert "another thread" in refused[0]
    with pytest.raises(UserError, match="contains no checkpoint; pass the dump folder of a run"):
        titanlite.generate_text(found[0], "a")


@pytest.mark.slow
def test_what_cannot_run_is_refused(train: Callable[..., TrainedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"training.stesp(.|\n)*did you mean training.steps"):
        train("out", {"training.stesp": 3})
    config = titanlite.load_config("quickstart")
    with pytest.raises(UsageError, match="give them to load_config"):
        titanlite.run(config, {"training.steps": 3})
    with pytest.raises(ConfigError, match=r"training.steps = 0\n"):
        titanlite.run(replace(config, training=replace(config.training, steps=0)))
    monkeypatch.setenv("TITANLITE_ELASTIC", "/tmp/file")
    with pytest.raises(UserError, match="fixed number of ranks"):
        titanlite.run(config)
    monkeypatch.delenv("TITANLITE_ELASTIC")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="destroy_process_group"):
            train()
    finally:
        dist.destroy_process_group()


def test_load_config_reads_python_values(tmp_path: Path) -> None:
    tokens = {"kind": "tokens", "path": TOKENS}
    sources = [{**tokens, "weight": 1}, {"kind": "tokens", "path": str(TOKENS), "weight": 2}]
    overrides = {
        "data.sources": sources,
        "data.sources.1.name": "two",
        "training.steps": 7,
        "optimizer.lr": np.float64(1e-3),
        "training.seq_len": np.int64(128),
        "validation.enable": False,
        "model.family": "qwen3",
        "parallelism.pp_split": (),
    }
    config = titanlite.load_config("quickstart", {**overrides, "model.flavor": "debug"})
    assert [(source.path, source.name, source.weight) for source in config.data.sources] == [
        (str(TOKENS), "", 1.0),
        (str(TOKENS), "two", 2.0),
    ]
    assert (config.training.steps, config.optimizer.lr, config.model.family) == (7, 1e-3, "qwen3")
    config = replace(config, optimizer=replace(config.optimizer, eps=np.float64(1e-9)))
    (tmp_path / "same.toml").write_text(dump_config(config))
    same = titanlite.load_config(tmp_path / "same.toml")
    assert replace(same, job=config.job) == config
    by_tokens = titanlite.load_config("quickstart", {"training.tokens": 8 * 256 * 5})  # in place of the file's steps
    assert by_tokens.training.steps == 5
    wrong = {"training.steps": "20", "optimizer.lr": None, "data.sources": {"kind": "text"}, "training": 3, "x.y": 1}
    with pytest.raises(ConfigError) as error:
        titanlite.load_config("quickstart", wrong)
    assert {problem.key for problem in error.value.problems} == wrong.keys()


@pytest.mark.slow
def test_generate_text_is_the_command(spoken: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["the model", "says"] * 4
    found = titanlite.generate_text(spoken, prompts, max_new_tokens=100, seed=3)
    assert capsys.readouterr().out == ""
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    generate([str(spoken.folder), *arguments, "--max-new-tokens", "100", "--seed", "3"])
    texts = [f"{prompt}{text}\n" for prompt, text in zip(prompts, found, strict=True)]
    assert capsys.readouterr().out == "".join(f"--- {row} of 8\n{text}" for row, text in enumerate(texts, 1))
    assert "<|endoftext|>" not in "".join(found)
    longer = titanlite.generate_text(spoken, prompts, max_new_tokens=100, seed=3, ignore_eos=True)
    assert "<|endoftext|>" in "".join(longer)
    (first,) = titanlite.generate_text(spoken, "the model", max_new_tokens=12, seed=3)
    saved = titanlite.open_run(str(spoken.folder))
    runs: list[AnyRun] = [saved, saved.path, str(spoken.folder)]
    for run in runs:
        assert titanlite.generate_text(run, "the model", max_new_tokens=12, seed=3) == [first]
    assert titanlite.generate_text(spoken, []) == []
    with pytest.raises(ConfigError) as error:
        titanlite.generate_text(spoken, "a", top_k=-1, max_new_tokens=0, temperature=-1.0)
    assert [problem.key for problem in error.value.problems] == ["max_new_tokens", "temperature", "top_k"]
    wrong: dict[str, Any] = {"max_new_tokens": 2.5, "temperature": "hot", "ignore_eos": "yes"}
    wrong |= {"weights": "avg", "device": "gpu", "dtype": "float8"}
    with pytest.raises(ConfigError) as error:
        titanlite.generate_text(spoken, "a", **wrong)
    assert {problem.key for problem in error.value.problems} == wrong.keys()
    with pytest.raises(ConfigError, match=r"prompts\[1\] = ''"):
        titanlite.generate_text(spoken, ["a", ""])


@pytest.mark.slow
def test_evaluate_run_has_the_loss_of_validation(spoken: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = settings_of_the_process()
    text = spoken.config.data.sources[0].path
    found = titanlite.evaluate_run(spoken, text)
    assert settings_of_the_process() == before
    assert capsys.readouterr().out == ""
    assert (found.step, found.checkpoint) == (6, spoken.folder / "checkpoint" / "step-6")
    assert found.loss == pytest.approx(spoken.loss, rel=0.2)
    assert found.bits_per_byte is not None
    table = [{"kind": "text", "path": text}]
    same = titanlite.evaluate_run(titanlite.open_run(spoken.folder), overrides={"validation.sources": table})
    assert (same.loss, same.perplexity, same.settings) == (found.loss, found.perplexity, found.settings)
    assert json.dumps(found.settings)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        titanlite.evaluate_run(spoken, text, overrides={"optimizer.lr": 1.0})
    task = write_task(spoken.folder.with_name("next.yaml"), [{"context": "the model", "answer": " reads"}] * 2)
    alone = titanlite.evaluate_run(spoken, tasks=task)
    assert (alone.loss, alone.by_source, list(alone.tasks)) == (None, {}, ["next"])
    (likely,) = alone.tasks["next"].log_likelihoods[0]
    assert alone.tasks["next"].numbers["bits_per_byte"] == pytest.approx(-likely / math.log(2) / len(" reads"))
    with pytest.raises(ConfigError, match="steps = 0"):
        titanlite.evaluate_run(spoken, text, steps=0)
    with pytest.raises(ConfigError, match="weights = 'avg'"):
        titanlite.evaluate_run(spoken, text, weights="avg")  # type: ignore[arg-type]


@pytest.mark.slow
def test_evaluate_run_reaches_stores_as_this_program_has_trained(
    spoken: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[storage] of the run's files is not used: others may have written them."""
    stored = replace(spoken, config=replace(spoken.config, storage=StorageConfig(endpoint="http://mine:1")))
    seen = []

    def evaluate_saved(_: Any, overrides: list[str], *__: Any) -> None:
        seen.extend(overrides)
        raise UserError("seen")

    monkeypatch.setattr(evaluate, "evaluate_saved", evaluate_saved)
    for run in stored, stored.folder:
        with pytest.raises(UserError, match="seen"):
            titanlite.evaluate_run(run)
    assert seen == ["--storage.endpoint=http://mine:1"]


def test_evaluate_run_on_conversations(spoken: TrainedRun, tmp_path: Path) -> None:
    answers = ("the model", "says it again " * 40)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": one}]} for one in answers]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"validation.sources": [{"kind": "chat", "path": tmp_path / "chat.jsonl", "name": "chat"}]}
    with pytest.raises(ConfigError, match=r"chat_template\n.* \(validation\.sources\.0\): .* has no chat template"):
        titanlite.evaluate_run(spoken, overrides=source)
    with pytest.raises(ConfigError, match=r"chat_template\n.* \(validation\.task_chat\): .* has no chat template"):
        titanlite.evaluate_run(spoken, tasks="piqa", overrides={"validation.task_chat": True})
    template = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    (tmp_path / "chat.jinja").write_text(template)
    found = titanlite.evaluate_run(spoken, overrides=source, chat_template=tmp_path / "chat.jinja")
    assert found.by_source["chat"].too_long == 1
    assert found.loss is not None
    with pytest.raises(ConfigError, match="chat_template = 'nowhere'"):
        titanlite.evaluate_run(spoken, overrides=source, chat_template="nowhere")


@pytest.mark.slow
def test_export_run_writes_the_folder_of_the_command(
    spoken: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert titanlite.export_run(spoken, tmp_path / "a", verify=False) == tmp_path / "a"
    assert capsys.readouterr().out == ""
    convert(["export", str(spoken.folder), "--out", str(tmp_path / "b"), "--no-verify"])
    content = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert content[0] == content[1]
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        titanlite.export_run(spoken, tmp_path / "c", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="already exists"):
        titanlite.export_run(spoken, tmp_path / "a")
