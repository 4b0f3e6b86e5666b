"""A folder for the commands of one page: what its reader has, and nothing else of this machine or the network."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.program import clean_environment
from tests.documentation.blocks import REPOSITORY, Block
from tests.task_files import CHOICE, TASK

CLONE = ("run_train.sh", "scripts", "configs", "examples", "benchmarks")
"""Parts of a clone of the repository that commands of the pages use."""

PROGRAMS = {
    "python": "",
    "python3": "",
    "pip": "-m pip",
    "titanlite": "-P -m titanlite",
    "torchrun": "-m torch.distributed.run",
}
"""Program -> the arguments of this Python that start it."""

TALK = """\
{"messages": [{"role": "user", "content": "What is a mesh?"}, {"role": "assistant", "content": "Ranks along axes."}]}
{"messages": [{"role": "user", "content": "And a rank?"}, {"role": "assistant", "content": "A process."}]}
"""

FILES = {
    # The reader's own configuration, of a model that trains in seconds. The README has one of its own.
    "my.toml": """\
[model]
family = "llama3"
flavor = "debug"
vocab_size = 512
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
[[data.sources]]
kind = "text"
path = "corpus/**/*.txt"
[tokenizer]
path = "my-tokenizer"
[training]
steps = 200
seq_len = 32
local_batch_size = 1
global_batch_size = 2
[optimizer]
ema_decay = 0.9
[checkpoint]
enable = true
[data]
ledger = true
""",
    # The reader's conversations.
    "talk.toml": """\
extends = "my.toml"
[job]
dump_folder = "outputs/chat"
[tokenizer]
path = "chat-tokenizer"
chat_template = "examples/chatml.jinja"
[training]
steps = 20
[[data.sources]]
kind = "chat"
path = "talk.jsonl"
""",
    "talk.jsonl": TALK * 20,
    "chat.jsonl": TALK * 20,
    "held_out.jsonl": TALK * 4,
    "questions.jsonl": '{"context": "Who?", "choices": ["Ada", "Bo"], "answer": 0}\n',
    "questions.yaml": f"{TASK.format(name='questions', data='questions.jsonl')}{CHOICE}",
    "base.toml": "",
    "cluster.toml": "",
    "plug.py": "",
    "my_package/__init__.py": "",
    "my_package/model.py": "",
    "held_out.txt": "A text that no run was trained on.\n" * 20,
    "more/a.jsonl": '{"text": "A row of another file."}\n' * 20,
    "docs.jsonl": '{"text": "A row of a third file."}\n' * 20,
    "capitals.jsonl": '{"context": "The capital is", "choices": [" Rome", " Paris", " Lima"], "answer": 1}\n' * 3,
    "endings.jsonl": '{"context": "A text that no run was", "answer": " trained"}\n' * 3,
    "a.txt": "Once upon",
    "b.txt": "The end",
    "question.txt": "What is",
    ".venv/bin/activate": "",
}

PREPARATIONS = {
    "tokenizer": "titanlite train-tokenizer my.toml --out my-tokenizer",
    "run": "titanlite train-tokenizer my.toml --out my-tokenizer\ntitanlite train my.toml",
    "chat": """\
titanlite train-tokenizer my.toml --out chat-tokenizer --special-tokens "<|im_start|>" "<|im_end|>"
titanlite train talk.toml
""",
    "folder": """\
titanlite train-tokenizer my.toml --out folder-tokenizer --vocab-size 2048 --special-tokens "<|im_start|>" "<|im_end|>"
titanlite train quickstart --job.dump_folder outputs/base --training.steps 2 --training.seq_len 64 \\
    --lr_schedule.warmup_steps 1 --validation.enable false --model.vocab_size 2048 \\
    --tokenizer.path folder-tokenizer --tokenizer.chat_template examples/chatml.jinja
titanlite convert export outputs/base --out my-model
""",
    "quickstart": """\
for folder in quickstart short; do
    titanlite train quickstart --job.dump_folder outputs/$folder --training.steps 3 --training.seq_len 64 \\
        --lr_schedule.warmup_steps 1 --validation.enable false --metrics.log_freq 1
done
""",
}
"""Preparation, named by a comment above a block -> its commands."""


@dataclass(frozen=True)
class Result:
    """A program that has run. name: of the block or preparation. output: of stdout and stderr."""

    name: str
    seconds: float
    exit_code: int
    output: str

    def __str__(self) -> str:
        return f"{self.seconds:7.1f} s  exit {self.exit_code}  {self.name}"


class Workplace:
    """The folder, in which the blocks of one page run in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prepared: set[str] = set()
        for name in CLONE:
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / "corpus").mkdir()
        for page in (REPOSITORY / "docs").glob("*.md"):
            shutil.copy(page, folder / "corpus" / f"{page.stem}.txt")
        for name, text in FILES.items():
            self.write(name, text)
        for name, arguments in PROGRAMS.items():
            self.write(f".venv/bin/{name}", f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (folder / ".venv/bin" / name).chmod(0o755)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def run_blocks(self, blocks: Iterable[Block]) -> Iterator[Result]:
        """Write the blocks that are files and run the others, with their preparations."""
        for block in blocks:
            if block.file:
                self.write(block.file, block.text)
                continue
            if not block.is_program:
                continue
            for name in block.before:
                if name not in self._prepared:
                    self._prepared.add(name)
                    yield self._run("bash", PREPARATIONS[name], f"before {block}: {name}")
            yield self._run(block.language, block.text, str(block))

    def _run(self, language: str, text: str, name: str) -> Result:
        script = "block.py" if language == "python" else "block.sh"
        self.write(script, text)
        program = ["python"] if language == "python" else ["bash", "-euo", "pipefail"]
        began = time.monotonic()
        with (self.folder / "output").open("w+") as output:
            process = subprocess.Popen(
                [*program, script],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait()
            finally:
                if process.poll() is None:  # the test has reached its time limit
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            return Result(name, time.monotonic() - began, code, output.read())

    def _environment(self) -> dict[str, str]:
        own = {
            "PATH": os.pathsep.join([str(self.folder / ".venv/bin"), os.environ["PATH"]]),
            "HOME": str(self.folder / "home"),
            "TITANLITE_CACHE": str(self.folder / "cache"),
            # no network
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        }
        return clean_environment() | own
