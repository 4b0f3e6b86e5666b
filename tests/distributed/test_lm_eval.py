"""Tasks have the numbers of lm_eval on the exported folder, per question. Needs `pip install "lm_eval[hf]"`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

import titanlite
from tests.distributed.program import start_command, start_program
from titanlite.data.bpe import train_bpe

WORDS = ["the", "model", "reads", "it", "is", "given", "again", "né", "größer", "東京", "tower"]
FILES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CLOZE = """
output_type: loglikelihood
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def write_tasks(folder: Path) -> None:
    """Contexts without text, with whitespace at their end, and longer than the model."""
    draw = random.Random(0)
    choices, answers = [], []
    for index in range(41):
        context = words(draw, draw.choice((0, 1, 3, 10, 60)))
        context += draw.choice((" ", "  ", ": ", "\n", "")) if context else ""
        texts = [words(draw, draw.choice((1, 1, 2, 5))) for _ in range(draw.choice((2, 3, 4)))]
        choices.append({"context": context, "choices": texts, "answer": index % len(texts)})
        answers.append({"context": words(draw, draw.choice((1, 3, 60))), "answer": draw.choice((" ", " né", ".\n"))})
    for name, rows in (("choice", choices), ("cloze", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = FILES.format(name=name, folder=folder) + (CHOICE if name == "choice" else CLOZE)
        (folder / "tasks" / f"{name}.yaml").write_text(text)


@pytest.mark.soak
@pytest.mark.parametrize("has_bos", [False, True])
def test_tasks_have_the_numbers_of_lm_eval(tmp_path: Path, has_bos: bool) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    draw = random.Random(1)
    text = "".join(words(draw, 9) + ".\n" for _ in range(2000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path)
    train_bpe(iter([text]), 300, tmp_path)
    if has_bos:
        library = Library.from_file(str(tmp_path / "tokenizer.json"))
        library.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        library.save(str(tmp_path / "tokenizer.json"))
    start_program(
        tmp_path,
        *("--data.sources.0.kind", "text", "--data.sources.0.path", str(tmp_path / "text.txt")),
        *("--tokenizer.path", str(tmp_path), "--model.vocab_size", "320", "--model.flavor", "debug"),
        *("--model.max_seq_len", "64", "--training.seq_len", "64", "--training.steps", "60", "--optimizer.lr", "0.003"),
        *("--checkpoint.enable", "true"),
    ).succeed()
    titanlite.export_run(tmp_path / "out", tmp_path / "exported", verify=False)
    own = start_command(
        tmp_path,
        *(str(tmp_path / "out"), "--json", str(tmp_path / "own.json")),
        *("--tasks", str(tmp_path / "choice.jsonl"), "--tasks", str(tmp_path / "cloze.jsonl")),
        ranks=0,
        program=("-m", "titanlite.tools.evaluate"),
    ).succeed()
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4", "--log_samples"),
        # With its cache, lm_eval 0.4.13 takes the logits of other positions if two rows have the same tokens, divided
        # differently into context and choice.
        *("--model_args", f"pretrained={tmp_path / 'exported'},dtype=float32,logits_cache=False"),
        *("--tasks", "choice,cloze"),
        *("--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "theirs")),
    ]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(own.output, done.stdout, sep="\n")
    found: Any = json.loads((tmp_path / "own.json").read_text())["tasks"]
    (results,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]
    for name, scores in (("choice", ("acc", "acc_norm")), ("cloze", ("acc", "perplexity"))):
        for score in scores:
            assert found[name][score] == pytest.approx(theirs[name][f"{score},none"], rel=1e-5)
            if score != "perplexity":  # its error is a bootstrap there
                assert found[name][f"{score}_stderr"] == pytest.approx(theirs[name][f"{score}_stderr,none"], rel=1e-9)
        (samples,) = (tmp_path / "theirs").rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        assert len(rows) == len(found[name]["log_likelihoods"]) == 41
        for row, sums in zip(rows, found[name]["log_likelihoods"], strict=True):
            assert sums == pytest.approx([float(each[0]) for each in row["filtered_resps"]], rel=1e-5)
    assert 0 < found["cloze"]["acc"] < 1
    assert found["choice"]["num_truncated"] > 0
