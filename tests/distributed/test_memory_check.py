"""Runs that do not fit into memory: refused, or out of memory with one message; the batch that fits, on two ranks."""

from pathlib import Path

import pytest

from tests.distributed.program import own_tracebacks, start_program

TOO_LARGE = ("--model.dim", str(2**20), "--model.ffn_dim", str(2**30))
"""4 PiB for each matrix: above the address space, so that the allocation fails on any machine."""


@pytest.mark.slow
def test_the_memory_of_a_run_on_two_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("refused", "failed", "fitted")]
    for folder in folders:
        folder.mkdir()
    fits = ("--training.local_batch_size", "-1", "--training.global_batch_size", "8", "--training.steps", "2")
    refused, failed, fitted = (
        start_program(folders[0], *TOO_LARGE, ranks=2),
        start_program(folders[1], *TOO_LARGE, "--memory.check", "off", ranks=2),
        start_program(folders[2], *fits, ranks=2),
    )
    for program, text in (
        (refused, "titanlite: the model does not fit: ranks 0 to 1 on "),
        (failed, " is out of memory "),
    ):
        assert program.wait() != 0
        assert program.output.count(text) == program.output.count("titanlite: ") == 1, program.output
        assert "largest items of the plan" in program.output
        assert program.output.count("  remedy: ") == 3
        assert own_tracebacks(program.output) == 0
    assert "; nothing was allocated" in refused.output
    assert "before the first step: planned " in failed.output
    assert "can't allocate memory" in failed.output
    assert fitted.wait() == 0, fitted.output
    assert "training.local_batch_size = -1: 4 sequences per microbatch, accumulation 1; planned peak" in fitted.output
    assert "Batch: local 4, global 8, accumulation 1" in fitted.output
    assert "local_batch_size = 4" in (folders[2] / "out" / "config.toml").read_text()
