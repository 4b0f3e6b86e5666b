"""Mistakes in a plugin's family, and a layout that does not fit, as the command finds them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring import configuration
from tests.unit.tools.plan.test_rehearsal_faults import TINY
from titanlite.planning.estimate import estimate
from titanlite.runtime.memory import GIB, USABLE

PLUGIN = """
import torch, torch.distributed as dist, titanlite
from titanlite.models.decoder import Block
from titanlite.models.head import OutputLayer
from titanlite.models.llama3 import LLAMA3, Llama3, attention

KEPT = []

class Head(OutputLayer):
    def transform(self, logits):
        {transform}
        return logits * 1.0

class Wrong(Block):
    def forward(self, x, *args, **options):
        {block}
        return super().forward(x, *args, **options)

def build(config):
    model = Llama3(config, lambda _: Wrong(config, attention(config)))
    {model}
    return model

titanlite.register_family(LLAMA3.variant("wrong", build))
"""
NOTHING = {"transform": "pass", "block": "pass", "model": "pass"}

MISTAKES: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "a tensor on the CPU": (
        {"block": "x = x + torch.arange(x.shape[-1])"},
        (),
        ": wrong/wrong.py mixes tensors of the host with those of the device",
    ),
    "a read of the device": (
        {"block": "x = x * 2 if x.sum().item() > 0 else x"},
        (),
        ": wrong/wrong.py reads values of the device 2 times in a step",
    ),
    "a collective of one rank": (
        {"block": "dist.get_rank() == 1 and dist.all_reduce(torch.zeros(3, device=x.device))"},
        (),
        "ranks 0 and 1 of one stage call different collectives: number ",
    ),
    "a layer that is gathered twice": (
        {"block": "x = x + self.feed_forward(x)"},
        ("parallelism.tp=2",),
        ": tp all-gather: ",
    ),
    "a head that keeps its logits": (
        {"transform": "KEPT.append(logits)", "model": "model.output = Head(config.dim, config.vocab_size)"},
        ("model.vocab_size=65536", "training.seq_len=2048", "model.max_seq_len=2048"),
        "the largest difference is activations",
    ),
    "a shape": ({"block": "x = x @ torch.zeros(3, 5, device=x.device)"}, (), ": the program ends with RuntimeError: "),
}
"""Name -> (parts of PLUGIN, further settings, what the command says of 2 ranks)."""


def rehearsed(folder: Path, ranks: int, *settings: str, options: tuple[str, ...] = ()) -> tuple[Any, str]:
    """(the JSON, the error) of the command, on texts in the folder."""
    (folder / "text.txt").write_text("text\n")
    source = ("data.sources.0.kind=text", f"data.sources.0.path={folder}/text.txt")
    values = dict(each.split("=", 1) for each in (*TINY, *source, *settings))
    words = [f"--{key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "titanlite", "plan", "quickstart", f"--world-size={ranks}", "--rehearse", "--json"]
    ended = subprocess.run([*command, *options, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    found = json.loads(ended.stdout)
    error = ended.stderr.removeprefix("titanlite: ").strip()
    assert "\n".join(found["problems"]) == error
    return found, error


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "a read of the device" else pytest.mark.soak)
        for name in MISTAKES
    ],
)
def test_the_command_finds_a_planted_mistake(name: str, tmp_path: Path) -> None:
    parts, settings, expected = MISTAKES[name]
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "wrong.py").write_text(PLUGIN.format(**NOTHING | parts))
    plugin = (f'job.plugins=["{folder}/wrong.py"]', "model.family=wrong")
    _, error = rehearsed(tmp_path, 2, *plugin, *settings)
    assert expected in error


@pytest.mark.soak
def test_the_command_finds_a_stage_that_does_not_fit(tmp_path: Path) -> None:
    """The mean of the stages would: the first and the last one, with the vocabulary, do not."""
    wide = ("model.dim=1024", "model.n_heads=8", "model.n_kv_heads=8", "model.vocab_size=128000", "model.n_layers=4")
    settings = (*wide, "parallelism.pp=4", "training.global_batch_size=8", "activation_checkpoint.mode=full")
    plans = estimate(configuration([*TINY, *settings], 4, "cuda"), 4, device_type="cuda").ranks
    assert sum(each.memory.total for each in plans) / 4 < USABLE * 2.5 * GIB
    _, error = rehearsed(tmp_path, 4, *settings, options=("--device-memory-gib=2.5",))
    assert re.fullmatch(r"rank 0: does not fit: .*\nrank 3: does not fit: .*", error)
