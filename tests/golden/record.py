"""Record the golden runs. A record of these is only replaced with a reason, which the commit message states.

`python -m tests.golden.record` overwrites first_steps.json. If these numbers change, the numerics of every run change.

`python -m tests.golden.record run` replaces the run of test_saved_run.py: four steps on two ranks, and the checkpoint.
The expected steps stay; other last bits of the weights need other hashes of the export.

`python -m tests.golden.record runs [NAME ...]` trains the runs of test_runs.py again, and writes what they are expected
to give. A run that later versions cannot use is an error in the later version: none is recorded again for that.
"""

import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.program import rows, start_command
from tests.golden.use import RUNS, results_of, workplace
from tests.unit.hf.making import write_model
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.data.bpe import train_bpe

FOLDER = Path(__file__).parent
RECORD = FOLDER / "first_steps.json"


def first_steps(dump_folder: Path) -> list[dict[str, float]]:
    """Train the golden configuration in one process; returns the loss and gradient norm of each step."""
    config = ["--job.config_file", str(FOLDER / "config.toml"), "--job.dump_folder", str(dump_folder)]
    program = start_command(dump_folder.parent, *config, "--data.sources.0.path", str(FOLDER / "tokens.npy"))
    if program.wait() != 0:
        raise RuntimeError(program.output)
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows(dump_folder)]


def save_run(folder: Path) -> None:
    """Train the first four steps of the saved run in `folder`, and store its files."""
    for file in (FOLDER / "saved_run" / "config.toml", FOLDER / "tokens.npy"):
        shutil.copy(file, folder)
    program = start_command(folder, "config.toml", "--job.dump_folder", "run", "--training.steps", "4", ranks=2)
    if program.wait() != 0:
        raise RuntimeError(program.output)
    run, target = folder / "run", FOLDER / "saved_run" / "run"
    shutil.rmtree(target)
    shutil.copytree(run / "checkpoint", target / "checkpoint")
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(run / name, target)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with a token per byte, EOS and the tokens of the chat template."""
    (folder / "tokenizer").mkdir()
    train_bpe(iter(["abc"]), 259, folder / "tokenizer", ("<|im_start|>", "<|im_end|>"))


def words(number: int) -> str:
    """A text that depends on the number."""
    drawn = random.Random(number)
    return " ".join(drawn.choice(["of", "golden", "runs", "seven", "an", "order", "x"]) for _ in range(3 + number % 9))


def write_texts(folder: Path) -> None:
    """A tokenizer, paragraphs, and JSON lines."""
    write_tokenizer(folder)
    (folder / "letters.txt").write_text("\n\n".join(words(number) for number in range(60)) + "\n")
    lines = [json.dumps({"text": words(100 + number)}) + "\n" for number in range(60)]
    (folder / "lines.jsonl").write_text("".join(lines))


def write_token_files(folder: Path) -> None:
    """Token files of the texts, in two parts, without the texts."""
    write_texts(folder)
    sources = ("--data.sources.0.kind", "jsonl", "--data.sources.0.path", "lines.jsonl")
    options = ("--out", "tokens", "--workers", "0", "--part-bytes", "2000")
    arguments = ("config.toml", *options, *sources, "--tokenizer.path", "tokenizer")
    start_command(folder, *arguments, program=("-m", "titanlite.tools.tokenize")).succeed()
    for name in ("letters.txt", "lines.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "tokenizer")


def write_conversations(folder: Path) -> None:
    """A tokenizer, conversations of one or two turns, of which some have more than 65 tokens, and JSON lines."""
    write_texts(folder)
    (folder / "letters.txt").unlink()
    conversations = []
    for number in range(60):
        turns = [("user", words(number)[:12]), ("assistant", words(number + 1)[: 3 + number])] * (1 + number % 2)
        conversations.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in conversations))


def import_model(folder: Path) -> None:
    """A model folder, imported as the run `imported`."""
    sizes = {"dim": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "ffn_dim": 16, "n_layers": 1, "max_seq_len": 64}
    write_model(folder / "model", "qwen3", torch.float32, **sizes, rope_theta=100.0, tie_embeddings=True)
    program = ("-m", "titanlite.tools.convert")
    start_command(folder, "import", "model", "--out", "imported", program=program).succeed()
    shutil.rmtree(folder / "model")
    neutralize(folder / "imported", folder)


def write_more_tokens(folder: Path) -> None:
    np.save(folder / "more.npy", np.random.default_rng(5).integers(0, 131, 1500, dtype=np.uint16))


@dataclass(frozen=True)
class Recipe:
    """How a run is trained. layout: its arguments. prepare: writes data that config.toml needs."""

    ranks: int = 0
    layout: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None


RECIPES = {
    "experts": Recipe(2, ("--parallelism.ep=2",)),
    "linear_attention": Recipe(2, ("--parallelism.dp_replicate=2",)),
    "latent_attention": Recipe(2, ("--parallelism.pp=2",)),
    "muon": Recipe(2),
    "stages": Recipe(2, ("--parallelism.cp=2",), write_texts),
    "bit_equal": Recipe(2, ("--parallelism.dp_replicate=2",), write_more_tokens),
    "token_files": Recipe(prepare=write_token_files),
    "chat": Recipe(2, ("--parallelism.dp_replicate=2",), write_conversations),
    "import": Recipe(2, prepare=import_model),
    "plugin": Recipe(),
}
SOURCES = ("config.toml", "plugin.py", "template.jinja")
"""Files of a stored run that no recipe writes."""
NOT_STORED = ("job.lock", "train.log")


def record_run(name: str, folder: Path) -> None:
    """Train the first four steps of a run in `folder`, use it, and store its files and results."""
    recipe, target = RECIPES[name], RUNS / name
    for file in target.iterdir():
        if file.name in SOURCES:
            shutil.copy(file, folder)
    shutil.copy(FOLDER / "tokens.npy", folder)
    if recipe.prepare is not None:
        recipe.prepare(folder)
    arguments = ("config.toml", *recipe.layout, "--checkpoint.stop_after", "4")
    start_command(folder, *arguments, ranks=recipe.ranks).succeed()
    neutralize(folder / "run", folder)
    for left in ("tokens.npy", "output", "cache", *(f"run/{file}" for file in NOT_STORED)):
        path = folder / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(target)
    shutil.copytree(folder, target)
    with tempfile.TemporaryDirectory() as temporary:
        expected = results_of(workplace(name, Path(temporary)))
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def neutralize(run: Path, folder: Path) -> None:
    """Remove the paths below `folder` and the name of this host from the files of a run."""

    def neutral(text: str) -> str:
        text = text.replace(f"{folder}/", "")
        return re.sub(r'"(hosts|slowest_host)": "[^"]*"', r'"\1": "host"', text)

    for file in (run / "config.toml", run / "run.json", run / "metrics.jsonl"):
        if file.exists():
            file.write_text(neutral(file.read_text()))
    for file in run.glob("records/*.npz"):
        with np.load(file) as record:
            arrays = dict(record)
        arrays["about"] = np.frombuffer(neutral(arrays["about"].tobytes().decode()).encode(), dtype=np.uint8)
        np.savez(file, **arrays)
    for checkpoint in run.glob("checkpoint/step-*"):
        manifest = read_manifest(checkpoint)
        (checkpoint / MANIFEST_FILE).unlink()
        config: dict[str, Any] = json.loads(neutral(json.dumps(manifest.config)))
        write_manifest(checkpoint, replace(manifest, config=config))


if __name__ == "__main__":
    if sys.argv[1:2] == ["runs"]:
        for name in sys.argv[2:] or RECIPES:
            with tempfile.TemporaryDirectory() as temporary:
                record_run(name, Path(temporary))
        sys.exit()
    if sys.argv[1:] == ["run"]:
        with tempfile.TemporaryDirectory() as temporary:
            save_run(Path(temporary))
        sys.exit()
    with tempfile.TemporaryDirectory() as temporary:
        steps = first_steps(Path(temporary) / "out")
    RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n]\n")
    print(f"{len(steps)} steps written to {RECORD}")
