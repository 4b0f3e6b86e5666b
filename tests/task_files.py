"""Task files of lm-evaluation-harness for tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
CHOICE = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CLOZE = """\
output_type: loglikelihood
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""


def write_task(path: Path, rows: Sequence[Mapping[str, Any]], more: str = "") -> Path:
    """Write a task in YAML, named as the file, and its data beside it; a multiple choice if the rows have choices.

    more: other lines of the YAML, in place of those of multiple choices and clozes if they have an output_type.
    """
    data = path.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "" if "output_type" in more else CHOICE if "choices" in rows[0] else CLOZE
    path.write_text(TASK.format(name=path.stem, data=data) + kind + more)
    return path
