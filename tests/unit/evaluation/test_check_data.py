"""Validation data is read before step 1: what would end the first validation is an error there."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch.distributed as dist

from tests.unit.data.conversations import TEMPLATE
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader, build_loader
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.evaluation.evaluator import Evaluator
from titanlite.ranks.agreement import RanksError
from titanlite.ranks.signals import StopRequest


class Case:
    """Checks conversations as validation data of sequences of 32 tokens."""

    def __init__(self, folder: Path, tokenizer: Path, group: dist.ProcessGroup) -> None:
        self._file = folder / "held_out.jsonl"
        (folder / "template.jinja").write_text(TEMPLATE)
        self._tokenizer = Tokenizer(tokenizer, chat_template=str(folder / "template.jinja"))
        model: Any = SimpleNamespace(counts_rows=True)
        shape: Any = None  # of the rows of tasks
        self._evaluator = Evaluator(model, group, StopRequest(), shape)

    def check(
        self, turns: Sequence[tuple[str, str]], on_bad_row: Literal["stop", "skip"] = "stop", steps: int = -1
    ) -> Loader:
        """turns: question and answer of each conversation."""
        rows = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in turns
        ]
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows).replace("BAD", '"'))
        source = SourceConfig("chat", path=str(self._file), epochs=1)
        section = DataConfig(
            num_streams=2, max_piece_bytes=512, on_bad_row=on_bad_row, shuffle=False, sources=(source,)
        )
        sizes = {"seq_len": 32, "vocab_size": 300, "global_batch_size": 2, "local_batch_size": 1}
        loader = build_loader(section, self._tokenizer, **sizes, data_rank=0, data_degree=1)
        try:
            self._evaluator.check_data({"held_out": loader}, steps=steps, max_bad_rows=1)
        finally:
            loader.close()
        return loader


GOOD, LATE = ("a", "the model"), ("the model " * 40, "reads")


def test_validation_data_that_cannot_be_used_is_refused(
    tokenizer_folder: Path, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    case = Case(tmp_path, tokenizer_folder / "tokenizer.json", group)
    loader = case.check([GOOD, LATE])
    assert (loader.too_long, loader.bad_rows) == ([0], 0), "back at its beginning"
    with pytest.raises(RanksError, match=r"no token to predict \(2 conversations of more than training\.seq_len \+ 1"):
        case.check([LATE, LATE])
    bad = ("a", "BAD")
    with pytest.raises(RanksError, match=r"^bad row: .*held_out\.jsonl, line 3: invalid JSON"):
        case.check([GOOD, GOOD, bad])
    case.check([GOOD, GOOD, bad], "skip")
    with pytest.raises(RanksError, match=r"^data\.max_bad_rows = 1: 2 rows"):
        case.check([GOOD, GOOD, bad, bad], "skip")
    case.check([GOOD, GOOD, GOOD, GOOD, bad], steps=1)  # a validation does not read it
