"""Training on a Hub dataset, served by a local stand-in for the Hub."""

import json
import random
from pathlib import Path

import pytest

from tests.distributed.program import CONFIG, Starter, rows
from tests.distributed.reference import VOCAB_SIZE
from tests.unit.data.small_hub import COMMIT, SmallHub, small_hub
from titanlite.data.bpe import train_bpe

pytestmark = pytest.mark.slow

MOVED = "d1" * 20
WORDS = ("the", "model", "reads", "a", "few", "words", "and", "learns", "which", "of", "them", "follow")


def write_dataset(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for file in range(2):
        texts = [" ".join(rng.choices(WORDS, k=rng.randrange(3, 40))) for _ in range(50)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"train-0000{file}-of-00002.jsonl").write_text("".join(lines))


@pytest.mark.soak  # default suite: the parts in tests/unit/data/test_hub.py
def test_run_keeps_the_commit_of_its_start(tmp_path: Path, start: Starter) -> None:
    """On all ranks, also if it is resumed after the dataset has changed. No file contains the access token."""
    write_dataset(tmp_path / "hub" / "user" / "dataset")
    (tmp_path / "tokenizer").mkdir()
    train_bpe(iter(WORDS * 9), 300, tmp_path / "tokenizer")
    config = tmp_path / "config.toml"
    tokenizer = f'[tokenizer]\npath = "{tmp_path / "tokenizer"}"\n[checkpoint]\nenable = true\ninterval = 3\n'
    model, size = CONFIG[: CONFIG.index("[[data.sources]]")], f"vocab_size={VOCAB_SIZE}"
    text = model.replace(size, "vocab_size=300").replace("[lr_schedule]", '[lr_schedule]\ndecay = "none"') + tokenizer
    config.write_text(text + '[[data.sources]]\nkind = "hf"\npath = "user/dataset"\n')
    local = text + f'[[data.sources]]\nkind = "hf"\npath = "{tmp_path / "hub" / "user" / "dataset"}"\n'

    def train(hub: SmallHub, *arguments: str, ranks: int = 0, file: Path = config) -> tuple[int, str]:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_canary"}
        program = start(
            tmp_path, "--job.config_file", str(file), *arguments, ranks=ranks, environment=environment, name="output"
        )
        return program.wait(), program.output

    with small_hub(tmp_path / "hub") as hub:
        code, output = train(hub, "--training.steps", "3", "--training.local_batch_size", "4", ranks=2)
        assert code == 0, output
        assert f"hf user/dataset at commit {COMMIT}: 2 files, streamed" in output
        hub.commit = MOVED
        code, output = train(hub)
        assert code != 0
        assert f'commit "{COMMIT}" -> "{MOVED}"' in output
        code, output = train(hub, "--training.steps", "6", file=tmp_path / "out" / "config.toml")
        assert code == 0, output
    assert "Bearer hf_canary" in hub.authorizations
    for file in [*(tmp_path / "out").rglob("*"), *(tmp_path / "cache").rglob("*"), tmp_path / "output"]:
        assert not file.is_file() or b"hf_canary" not in file.read_bytes()

    config.write_text(local)
    code, output = train(hub, "--job.dump_folder", str(tmp_path / "local"))  # the server is stopped and not needed
    assert code == 0, output
    assert [row["loss"] for row in rows(tmp_path / "out")] == pytest.approx(
        [row["loss"] for row in rows(tmp_path / "local")], rel=1e-12
    )
