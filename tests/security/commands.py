"""Which kinds of a stranger's files each command takes, and how it is started with them."""

from collections.abc import Mapping
from typing import Literal

Kind = Literal[
    "run",  # a dump folder
    "bucket",  # a dump folder in a store
    "model",  # a model folder of transformers
    "corpus",  # what a source names, also in a store
    "tokenizer",
    "template",  # a chat template
    "task",  # of lm-evaluation-harness, named by the user
    "ladder",  # a folder of `titanlite ladder`
    "profile",  # of hardware
    "name",  # of the configuration, or the run
    "folder",  # the current one
    "cache",  # the cache folder, of another user
]

OUT = "../out/made"
"""Stands for what a command is told to write."""
CHAT = "--data.sources.0.kind chat --data.sources.0.path data/chat.jsonl --validation.enable=false"

STARTS: Mapping[str, Mapping[Kind, str]] = {
    "train": {
        "run": "{config} --training.steps 6",
        **dict.fromkeys(("corpus", "tokenizer", "name", "cache", "folder"), "{config} --job.dump_folder " + OUT),
        "template": f"{{config}} --job.dump_folder {OUT} --tokenizer.chat_template template.jinja {CHAT}",
        "model": f"{{config}} --job.dump_folder {OUT} --checkpoint.initial_load_path hf:model "
        "--model.n_layers 2 --model.ffn_dim 32",
        "task": f'{{config}} --job.dump_folder {OUT} --validation.tasks ["task.yaml"]',
    },
    "sweep": dict.fromkeys(
        ("corpus", "tokenizer", "name", "cache", "folder"),
        f"{{config}} --optimizer.lr 0.1,0.2 --job.dump_folder {OUT} --write-slurm ../out/array.sbatch",
    ),
    "ladder": dict.fromkeys(
        ("corpus", "tokenizer", "cache", "folder"), "ladder.toml --write-slurm ../out/array.sbatch"
    ),
    "critical-batch": {
        "run": "{run} --batches 4 8 --tokens 64 --job.dump_folder " + OUT,
        "folder": "run --batches 4 8 --tokens 64 --write-slurm ../out/array.sbatch --job.dump_folder " + OUT,
    },
    "parity": dict.fromkeys(("corpus", "tokenizer", "cache", "folder"), "{config} --shrink --ranks 2 --steps 1"),
    "plan": {
        "name": "{config} --world-size 2",
        "folder": "{config} --world-size 2",
        "profile": "{config} --world-size 2 --hardware profile.toml",
    },
    "calibrate": {},  # its only path is one to write
    "profile": dict.fromkeys(("corpus", "tokenizer", "cache", "folder"), f"{{config}} --steps 1 --out {OUT}"),
    "convert": {
        **dict.fromkeys(("model", "folder"), f"import model --out {OUT}"),
        **dict.fromkeys(("run", "bucket"), f"export {{run}} --out {OUT} --no-verify"),
    },
    "generate": {
        **dict.fromkeys(("run", "bucket", "folder"), "{run} --prompt model --max-new-tokens 3"),
        "tokenizer": "run --prompt model --max-new-tokens 3 --tokenizer tokenizer",
        "template": "run --chat --prompt model --max-new-tokens 3 --chat-template template.jinja",
    },
    "evaluate": {
        **dict.fromkeys(("run", "bucket", "folder", "cache"), "{run}"),
        "corpus": "run --data {data}",
        "tokenizer": "run --tokenizer tokenizer",
        "task": "run --tasks task.yaml",
    },
    "inspect": {
        **dict.fromkeys(("corpus", "tokenizer", "name", "cache", "folder"), "{config}"),
        "template": f"{{config}} --tokenizer.chat_template template.jinja {CHAT}",
    },
    "schema": {"folder": "", "name": "{config}"},
    "tokenize": dict.fromkeys(
        ("corpus", "tokenizer", "name", "cache", "folder"), f"{{config}} --workers 0 --out {OUT}"
    ),
    "replay": dict.fromkeys(("run", "bucket", "folder"), "{run} --step 4"),
    "audit": dict.fromkeys(("run", "bucket", "folder"), f"{{run}} --seed 1 --out {OUT} --repeats 0"),
    "compare": dict.fromkeys(("run", "bucket", "folder"), f"{{run}} {{run}} --repeats 3 --steps 2 --out {OUT}"),
    "ledger": dict.fromkeys(("run", "folder"), "run"),
    "digest": {"model": "model", **dict.fromkeys(("run", "bucket", "folder"), "{run}")},
    "report": dict.fromkeys(("run", "bucket", "folder", "ladder"), "{run} --out ../out/report.html"),
    "train-tokenizer": dict.fromkeys(("corpus", "name", "folder"), f"{{config}} --vocab-size 280 --out {OUT}"),
}
"""Command -> kind -> arguments. {run}, {config}, {data}: paths of the workplace."""
