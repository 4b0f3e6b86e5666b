"""The folder of a careful user: a configuration, its data, a trained run, and a home with files that matter."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli
import tomli_w

from tests.task_files import write_task
from tests.unit.hf.making import write_model
from titanlite.checkpoint.manifest import MANIFEST_FILE, manifest_text, read_manifest
from titanlite.data.bpe import train_bpe
from titanlite.planning.hardware.machine import PROFILES

TEXT = "the model reads what it is given, and says it again\n"
ROWS = [{"text": f"{TEXT.strip()} {number}"} for number in range(60)]
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' }}"
TEMPLATE += "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
CONFIG = {
    "job": {"dump_folder": "run"},
    "model": {
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "ffn_dim": 24,
        "vocab_size": 300,
        "max_seq_len": 64,
    },
    "tokenizer": {"path": "tokenizer"},
    "training": {"steps": 4, "seq_len": 16, "local_batch_size": 2, "global_batch_size": 4, "bit_equal": True},
    "checkpoint": {"enable": True, "interval": 2},
    "metrics": {"log_freq": 1},
    "data": {"ledger": True, "sources": [{"kind": "jsonl", "path": "data/rows.jsonl"}]},
    "validation": {
        "enable": True,
        "interval": 2,
        "steps": 8,
        "sources": [{"kind": "jsonl", "path": "data/rows.jsonl"}],
    },
}
LADDER = {
    "config": "mine.toml",
    "rule": "fixed",
    "common": {"job": {"dump_folder": "../out/ladder"}, "training": {"bit_equal": False}},
    "rungs": [
        {"name": f"dim-{dim}", "model": {"dim": dim, "ffn_dim": dim}, "tokens": [128, 256, 512]} for dim in (8, 12, 16)
    ],
    "target": {"tokens": 2048, "model": {"dim": 32, "ffn_dim": 32}},
}


@dataclass
class Workplace:
    """root: of all files. home: the user's. here: the current folder. out: what commands are told to write to.

    data: the path of the corpus, for --data. run: the run that commands open, as the user types it. stranger, own: the
    stranger's (nobody may connect to it) and the user's own. variables: of the environment. objects: that a bucket has
    besides the run, by key below the run's.
    """

    root: Path
    stranger: str = ""
    own: str = ""
    data: str = "data/rows.jsonl"
    run: str = "run"
    config: str = "mine.toml"
    variables: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def here(self) -> Path:
        return self.root / "here"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def touch(self) -> str:
        """A shell command that shows that it ran."""
        return f"touch {self.root}/pwned"

    @property
    def python(self) -> str:
        """A Python statement that shows that it ran."""
        return f"open({str(self.root / 'pwned')!r}, 'w').close()"

    @property
    def expression(self) -> str:
        """An expression in Jinja that runs `touch` outside of a sandbox."""
        return "{{ cycler.__init__.__globals__.os.system('" + self.touch + "') }}"

    def environment(self) -> dict[str, str]:
        """HOME, caches and temporary files below root; credentials of the user, for the user's own server."""
        return {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "TITANLITE_CACHE": str(self.root / "cache"),
            "TMPDIR": str(self.root / "tmp"),
            "OMP_NUM_THREADS": "1",
            "AWS_ACCESS_KEY_ID": "AKIAUSER",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-user",
            "AWS_SESSION_TOKEN": "token-of-the-user",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.own,
            **self.variables,
        }

    def write_config(self, **changes: Any) -> None:
        """Change keys of the user's configuration, by section__key."""
        write_toml(self.here / "mine.toml", changes)

    def use(self, kind: str, path: str) -> None:
        """Train on this source."""
        self.data = path
        source = {"kind": kind, "path": path}
        self.write_config(data__sources=[source], validation__sources=[source])

    def change_run(self, **changes: Any) -> None:
        """Change keys of the run's saved configurations, by section__key, and seal the manifests again."""
        write_toml(self.here / "run" / "config.toml", changes)
        for manifest in (self.here / "run" / "checkpoint").glob(f"*/{MANIFEST_FILE}"):
            config = {section: dict(table) for section, table in read_manifest(manifest.parent).config.items()}
            change(config, changes)
            self.seal(manifest, config=config)

    def change_manifests(self, **changes: Any) -> None:
        """Change fields of the run's manifests, and seal them again. Mappings are merged into the present ones."""
        for manifest in (self.here / "run" / "checkpoint").glob(f"*/{MANIFEST_FILE}"):
            saved = read_manifest(manifest.parent)
            merged = {
                name: {**getattr(saved, name), **value} if isinstance(value, dict) else value
                for name, value in changes.items()
            }
            self.seal(manifest, **merged)

    def seal(self, manifest: Path, **changes: Any) -> None:
        manifest.write_bytes(manifest_text(replace(read_manifest(manifest.parent), **changes)))

    def link(self, name: str, target: Path) -> None:
        """Put a link in place of a file or folder of the run."""
        path = self.here / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


def change(tables: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        section, _, key = name.partition("__")
        tables.setdefault(section, {})[key] = value


def write_toml(file: Path, changes: dict[str, Any]) -> None:
    tables = tomli.loads(file.read_text())
    change(tables, changes)
    file.write_text(tomli_w.dumps(tables))


def write_clean(place: Workplace) -> None:
    """Everything but the run, which is trained from it."""
    for folder in (
        "home",
        "home/.ssh",
        "home/runs/mine/checkpoint/step-2",
        "here/data",
        "here/tokenizer",
        "out",
        "cache",
        "tmp",
    ):
        (place.root / folder).mkdir(parents=True)
    for name in (".bashrc", ".ssh/config", "runs/mine/metrics.jsonl", "runs/mine/checkpoint/step-2/weights"):
        (place.home / name).write_text("of the user\n")
    here, data = place.here, place.here / "data"
    (here / "mine.toml").write_text(tomli_w.dumps(CONFIG))
    (here / "ladder.toml").write_text(tomli_w.dumps(LADDER))
    train_bpe(iter([TEXT] * 4), 290, here / "tokenizer")
    (here / "template.jinja").write_text(TEMPLATE)
    shutil.copy(PROFILES / "h100.toml", here / "profile.toml")
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (data / "text.txt").write_text(TEXT * 60)
    (data / "rows.csv").write_text("text\n" + "".join(f"{row['text']!r}\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), data / "rows.parquet")
    np.save(data / "tokens.npy", np.arange(4000) % 290)
    turn = [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads it"}]
    (data / "chat.jsonl").write_text((json.dumps({"messages": turn}) + "\n") * 60)
    task = [{"context": "the model", "choices": [" reads", " says"], "answer": 0}] * 3
    write_task(here / "task.yaml", task)
    write_model(here / "model", vocab_size=300)
