"""A training step that neither logs nor saves makes the host wait for a GPU only at the places that the docs list."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.models.registry import FAMILIES
from titanlite.tools.plan.rehearsal.report import KNOWN_READS

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent

EXPERTS = "parallel/expert.py exchanged_feed_forward"
COUNTS = "models/experts.py feed_forward"
STAGES = "parallel/pipeline.py forward_backward"
WAITS = {
    EXPERTS: "`ep` above 1",
    COUNTS: "experts whose products are not bfloat16",
    STAGES: "`pp` above 1, first step",
    "faults/replicas.py compare": "`faults.check_replicas_every`",
    "faults/skipped.py check": "1,000 steps",
}
"""All places where the host waits in such steps, and when: those of docs/performance.md."""

BY_OPERATION = "activation_checkpoint.mode=selective activation_checkpoint.selective_policy=op"
SOURCES = "data.sources.1.kind=tokens data.sources.1.path=other.npy"
OPTIONS = f"faults.spike_factor=3 faults.on_spike=skip loss.z_loss=0.001 optimizer.qk_clip=100 {SOURCES} {BY_OPERATION}"
COMPOSED = "optimizer.state_dtype=bfloat16 optimizer.cautious_weight_decay=true optimizer.ema_decay=0.9"
MOMENTUM = "optimizer.name=SGD optimizer.momentum=0.9"

CASES: dict[str, set[str]] = {
    f"8 parallelism.tp=2 data.document_mask=true {COMPOSED} {OPTIONS}": set(),
    f"8 model.family=qwen3_moe parallelism.ep=4 optimizer.name=Muon model.bias_rate=0.001 {BY_OPERATION}": {EXPERTS},
    f"1 {MOMENTUM}": set(),
}
"""Number of ranks, and settings -> where rank 0 waits."""

NO_WAIT = ["AdamW", "Muon", "Lion", "SGD", "SGD optimizer.momentum=0.9", "AdamW optimizer.state_dtype=bfloat16"]
NO_WAIT += ["Muon optimizer.normuon_beta2=0.9 optimizer.orthogonalization=polar_express"]
INTERLEAVED = ("gemma2", "gemma3", "gpt_oss", "olmo3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
SHAPES = dict.fromkeys(INTERLEAVED, "model.n_layers=2 model.full_interval=2") | {"deepseek_v3": "model.n_layers=2"}
"""Of families with several kinds of blocks."""
OF_FAMILIES = [f"model.family={family} {SHAPES.get(family, '')}" for family in sorted(FAMILIES)]
SOAK: dict[str, set[str]] = {
    **{f"1 {family} optimizer.name={optimizer}": set[str]() for family, optimizer in product(OF_FAMILIES, NO_WAIT)},
    **{f"8 {family} optimizer.ema_decay=0.9 {SOURCES}": set[str]() for family in OF_FAMILIES},
    **{f"8 parallelism.{axis}=2 {BY_OPERATION}": set[str]() for axis in ("cp", "tp", "dp_replicate")},
    "8 parallelism.cp=2 parallelism.context_parallel=gather data.document_mask=true": set(),
    f"8 training.bit_equal=true {MOMENTUM}": set(),
    "1 training.bit_equal=true faults.spike_factor=3 optimizer.ema_decay=0.9": set(),
    "1 float8.recipe=rowwise": set(),
    "1 float8.recipe=blockwise": set(),
    "1 activation_checkpoint.mode=full training.global_batch_size=4": set(),
    f"1 debug.deterministic=true model.family=qwen3_next {SHAPES['qwen3_next']}": set(),
    "1 training.dtype=float64 training.mixed_precision_param=float64 training.mixed_precision_reduce=float64": set(),
    "1 model.family=qwen3_moe training.mixed_precision_param=float32": {COUNTS},
    "8 model.family=deepseek_v3 model.n_layers=2 parallelism.ep=4 parallelism.tp=2": {EXPERTS},
    f"8 model.family=gpt_oss {SHAPES['gpt_oss']} parallelism.ep=2 parallelism.cp=2 {BY_OPERATION}": {EXPERTS},
    **{
        f"8 model.n_layers=4 parallelism.pp=2 parallelism.pp_schedule={schedule} optimizer.name=Lion": {STAGES}
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    },
}


def waits_of(cases: Sequence[str], folder: Path) -> dict[str, Any]:
    """The waits of the first step and of the second one, by case; those of each kind of operation."""
    library = folder / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include", f"-Wl,-rpath,{TORCH}/lib"]
    libraries = [f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library), *libraries], check=True)
    program = [sys.executable, "-m", "tests.unit.host_waits"]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    ended = subprocess.run(
        program, input="\n".join(cases), env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = {line["case"]: line.get("waits", line.get("error")) for line in map(json.loads, ended.stdout.splitlines())}
    assert found.keys() == {"kinds", *cases}, ended.stdout[-2000:] + ended.stderr[-2000:]
    return found


# Another class for CUDA would be registered a second time. On a GPU, scripts/gpu_check.py looks for waits.
needs_fake_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None, reason="needs torch's build for CPUs, and g++"
)


@needs_fake_cuda
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", [CASES, pytest.param(SOAK, marks=pytest.mark.soak)], ids=["some", "all"])
def test_the_host_waits_only_where_the_docs_say(cases: dict[str, set[str]], tmp_path: Path) -> None:
    found = waits_of([*cases], tmp_path)
    for kind, count in found.pop("kinds").items():
        assert count == (not kind.startswith("none: ")), f"{kind}: the program notes {count} waits"
    problems = []
    for case, allowed in cases.items():
        if not isinstance(found[case], list):
            problems.append(f"{case}: {found[case]}")
            continue
        first, second = found[case]
        if set(first) != allowed or set(second) != allowed - {STAGES}:
            problems.append(f"{case}: {found[case]}, allowed: {allowed or 'none'}")
        elif EXPERTS in allowed and "model.n_layers" not in case and second[EXPERTS] != 1:
            problems.append(f"{case}: {second} in a step of one block and microbatch")
    assert not problems, "\n\n".join(problems)


def test_the_docs_list_the_waits() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    section = text.split("### Waits for the device\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert {f"{file} {function}" for file, function, _ in rows} == WAITS.keys()
    for file, function, when in rows:
        assert WAITS[f"{file} {function}"] in when
        assert f"def {function}(" in (ROOT / "titanlite" / file).read_text()


def test_a_rehearsal_accepts_the_waits_of_every_step() -> None:
    """Those of the models: the others are of some steps only, which a rehearsal does not run."""
    assert {file for file, _ in map(str.split, (EXPERTS, COUNTS))} == KNOWN_READS
