"""What a rehearsal counts of a start: requests to the TCPStore, and opens of token files."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.measuring import configuration
from titanlite.data.sources.token_table import TABLE_FILES
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.rehearsal.start import files_of, opens_of, planned_opens, planned_requests, requests_of

SMALL = ("model.dim=32", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64", "model.max_seq_len=32")
SMALL += ("model.n_layers=1", "model.vocab_size=300", "training.seq_len=32", "training.global_batch_size=8")


@pytest.mark.parametrize("size", [1, 8, 256])
@pytest.mark.parametrize("rank", [0, 3, 8, 255])
def test_requests_of_a_start_are_as_planned(size: int, rank: int) -> None:
    world = World(rank % size, rank % min(8, size), size, "cuda", min(8, size))
    requests, keys = requests_of(world)
    assert requests == planned_requests(world)
    assert (keys > 4 * size) == (rank % size == 0 and size > 1)


def write_tokens(folder: Path, files: int) -> tuple[str, ...]:
    """Settings of a source of so many token files."""
    for number in range(files):
        np.save(folder / f"{number:04}.npy", np.full(100, 7, np.uint16))
    return *SMALL, "data.sources.0.kind=tokens", f"data.sources.0.path={folder}"


@pytest.mark.parametrize(
    ("files", "most_of_others"), [(3, 3 * 7), pytest.param(TABLE_FILES + 1, 0, marks=pytest.mark.slow)]
)
def test_opens_of_token_files(files: int, most_of_others: int, tmp_path: Path) -> None:
    count, config = files_of(configuration(write_tokens(tmp_path, files), 8, "cuda", checks_files=False))
    assert count == files
    assert config is not None
    for is_first in (True, False):
        found, opens = opens_of(config, is_first=is_first)
        assert found == files
        assert opens <= planned_opens(files, is_first=is_first)
        if is_first:
            assert opens >= files
        else:
            assert opens <= most_of_others


def test_what_the_job_would_say_of_its_token_files(tmp_path: Path) -> None:
    settings = (*write_tokens(tmp_path, 1), "model.vocab_size=5")
    _, config = files_of(configuration(settings, 8, "cuda", checks_files=False))
    assert config is not None
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.path"):
        opens_of(config, is_first=True)


def test_texts_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    text = ("data.sources.0.kind=text", f"data.sources.0.path={tmp_path}/text.txt")
    assert files_of(configuration((*SMALL, *text), 8, "cuda", checks_files=False)) == (1, None)
