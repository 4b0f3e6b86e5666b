"""Tasks have the numbers of lm_eval on the exported folder, per document, on several meshes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

import titanlite
from tests.distributed.program import start_command, start_program
from tests.task_files import write_task
from titanlite.data.bpe import train_bpe

WORDS = ["the", "model", "reads", "it", "is", "given", "again", "né", "größer", "東京", "tower"]
TASKS = {"choice": ("acc", "acc_norm"), "shots": ("acc", "acc_norm"), "cloze": ("acc", "perplexity")}
LAYOUTS = {2: ("--parallelism.tp", "2"), 4: ("--parallelism.pp", "2", "--parallelism.cp", "2")}


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def write_tasks(folder: Path) -> None:
    """Contexts without text, with whitespace at their end, and longer than the model; two examples before each."""
    draw = random.Random(0)
    choices, answers = [], []
    for index in range(41):
        context = words(draw, draw.choice((0, 1, 3, 10, 60)))
        context += draw.choice((" ", "  ", ": ", "\n", "")) if context else ""
        texts = [words(draw, draw.choice((1, 1, 2, 5))) for _ in range(draw.choice((2, 3, 4)))]
        choices.append({"context": context, "choices": texts, "answer": index % len(texts)})
        answers.append({"context": words(draw, draw.choice((1, 3, 60))), "answer": draw.choice((" ", " né", ".\n"))})
    write_task(folder / "choice.yaml", choices)
    write_task(folder / "shots.yaml", choices, "fewshot_split: test\nnum_fewshot: 2\n")
    write_task(folder / "cloze.yaml", answers)


@pytest.mark.soak
@pytest.mark.parametrize("has_bos", [False, True])
def test_tasks_have_the_numbers_of_lm_eval(tmp_path: Path, has_bos: bool) -> None:
    draw = random.Random(1)
    text = "".join(words(draw, 9) + ".\n" for _ in range(2000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
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
    results = []
    for ranks in (0, *LAYOUTS):
        start_command(
            tmp_path,
            *(str(tmp_path / "out"), "--json", str(tmp_path / "own.json"), *LAYOUTS.get(ranks, ())),
            *(word for name in TASKS for word in ("--tasks", str(tmp_path / "tasks" / f"{name}.yaml"))),
            ranks=ranks,
            program=("-m", "titanlite.tools.evaluate"),
        ).succeed()
        results.append(json.loads((tmp_path / "own.json").read_text())["tasks"])
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4", "--log_samples"),
        # With its cache, lm_eval 0.4.13 takes the logits of other positions if two rows have the same tokens, divided
        # differently into context and choice.
        *("--model_args", f"pretrained={tmp_path / 'exported'},dtype=float32,logits_cache=False"),
        *("--tasks", ",".join(TASKS)),
        *("--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "theirs")),
    ]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]
    for found in results:
        for name, scores in TASKS.items():
            (samples,) = (tmp_path / "theirs").rglob(f"samples_{name}_*.jsonl")
            rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
            assert len(rows) == len(found[name]["log_likelihoods"]) == 41
            for row, sums in zip(rows, found[name]["log_likelihoods"], strict=True):
                assert sums == pytest.approx([float(each[0]) for each in row["filtered_resps"]], rel=1e-5)
            for score in scores:
                # Accuracies may differ by the documents that are counted as close.
                error = found[name]["num_close"] / 41 if score.startswith("acc") else 0.0
                assert found[name][score] == pytest.approx(theirs[name][f"{score},none"], rel=1e-5, abs=error + 1e-9)
        assert 0 < found["cloze"]["acc"] < 1
        assert found["choice"]["num_truncated"] > 0
