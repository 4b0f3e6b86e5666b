"""Tasks of lm-evaluation-harness, judged by its HFLM: the same tokens, scores and texts from the same model."""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from tests.task_files import write_task
from tests.unit.data.chat.chat_templates import STYLES, make_tokenizer
from titanlite.data.config import ValidationConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.evaluation import harness as module
from titanlite.evaluation.harness import Encoder, Harness, Row
from titanlite.metrics.scores import TaskScores
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.slow
SEQ_LEN = 96
WORDS = ["the", "model", "reads", "it", "<|im_start|>", "given", "again", "é", "日本", "<|begin_of_text|>"]
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_target: "{{context}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
GENERATED = """\
output_type: generate_until
doc_to_target: "{{context}}"
generation_kwargs: {until: ["e"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""
FEWSHOT = "fewshot_split: test\nnum_fewshot: 2\n"
STYLE_NAMES = ("qwen", "llama", "post-processor")


def mostly(first: str) -> pytest.MarkDecorator:
    """Parametrize the tokenizer: one style by default, the others as soak tests."""
    others = [pytest.param(name, marks=pytest.mark.soak) for name in STYLE_NAMES if name != first]
    return pytest.mark.parametrize("tokenizer", [first, *others], indirect=True)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Task files by name. Contexts without text, with whitespace at their end, and longer than the model."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    rows = []
    for index in range(31):
        context = words(draw, draw.choice((0, 1, 3, 10, 60)))
        context += draw.choice((" ", "  ", ": ", "\n", "")) if context else ""
        choices = [words(draw, draw.choice((1, 1, 2, 5))) for _ in range(draw.choice((2, 3, 4)))]
        rows.append({"context": context, "choices": choices, "answer": index % len(choices)})
    cloze = [{"context": words(draw, draw.choice((1, 3, 60))), "answer": draw.choice((" ", " é"))} for _ in range(31)]
    texts = [{"context": words(draw, draw.choice((1, 20, 150)))} for _ in range(9)]
    files = {
        "choice": write_task(folder / "choice.yaml", rows),
        "shots": write_task(folder / "shots.yaml", rows, FEWSHOT),
        "cloze": write_task(folder / "cloze.yaml", cloze),
        "texts": write_task(folder / "texts.yaml", texts, ROLLING),
        "generated": write_task(folder / "generated.yaml", texts, GENERATED),
    }
    files["all"] = folder / "all.yaml"
    files["all"].write_text("group: all\ntask: [choice, cloze]\naggregate_metric_list: [{metric: acc}]\n")
    return {name: str(path) for name, path in files.items()}


@pytest.fixture(scope="module", params=STYLE_NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without BOS; with BOS; with BOS that the post-processor puts before a text."""
    style, folder = request.param, tmp_path_factory.mktemp("tokenizer")
    base = "qwen" if style == "qwen" else "llama"
    made = make_tokenizer(base, STYLES[base], folder)
    if style != "post-processor":
        return made
    library = tokenizers.Tokenizer.from_file(made.arguments["file"])
    library.post_processor = bos_template(library)
    library.save(made.arguments["file"])
    return Tokenizer(made.arguments["file"], bos="<|begin_of_text|>")


def bos_template(library: tokenizers.Tokenizer) -> TemplateProcessing:
    bos = "<|begin_of_text|>"
    return TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))])


class Judge:
    """The harness with its HFLM on a small random model, whose logits also give the losses of rows."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, *, adds_bos: bool) -> None:
        import transformers
        from lm_eval.models.huggingface import HFLM

        self.adds_bos = adds_bos
        tokenizer.save(folder, adds_bos=adds_bos)
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=tokenizer.vocab_size, max_position_embeddings=SEQ_LEN, initializer_range=0.5, **sizes
        )
        config.eos_token_id = tokenizer.eos_id
        self.model = transformers.LlamaForCausalLM(config).to(torch.float64)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        # With its cache, lm_eval 0.4.13 takes other logits for rows with the same tokens, divided differently.
        self.lm = HFLM(self.model, tokenizer=loaded, batch_size=1, logits_cache=False, device="cpu")

    def results(self, specs: Sequence[str], **settings: Any) -> Any:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_defaults=False)
        return simple_evaluate(self.lm, tasks=list(specs), task_manager=manager, **settings)

    def losses(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """(loss, number of labels that are not the most likely token) of each row."""
        losses, misses = [], []
        for row in rows:
            tokens = torch.from_numpy(row.tokens)
            with torch.no_grad():
                logits = self.model(tokens[None, :-1]).logits[0, row.begin - 1 :]
            labels = tokens[row.begin :]
            losses.append(-float(logits.log_softmax(-1).gather(1, labels[:, None]).sum()))
            misses.append(float((logits.argmax(-1) != labels).sum()))
        return losses, misses

    def greedy(self, prompt: Sequence[int], most: int) -> Iterator[int]:
        tokens = list(prompt)
        for _ in range(most):
            with torch.no_grad():
                token = int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())
            if token == self.lm.eot_token_id:
                return
            tokens.append(token)
            yield token


@pytest.fixture(scope="module")
def judge(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tokenizer, tmp_path_factory.mktemp("exported"), adds_bos=tokenizer.adds_bos)


def scored(judge: Judge, tokenizer: Tokenizer, *specs: str, **settings: Any) -> dict[str, TaskScores]:
    section = ValidationConfig(enable=True, tasks=specs, **settings)
    adds_bos = judge.adds_bos
    harness = Harness(section, tokenizer, seq_len=SEQ_LEN, adds_bos=adds_bos, allows_code=False, why_no_text="")
    losses, misses = judge.losses(harness.rows)
    first = harness.scores(losses, misses, judge.greedy)
    assert harness.scores(losses, misses, judge.greedy) == first  # at a later interval, with the same requests
    return first


def agrees(found: dict[str, TaskScores], right: Any) -> bool:
    """Whether all numbers and likelihoods are those of the harness."""
    for name, numbers in right["results"].items():
        values = {key.removesuffix(",none"): value for key, value in numbers.items() if "," in key}
        known = {key: value for key, value in values.items() if value != "N/A" and "perplexity_stderr" not in key}
        if {key: found[name].numbers.get(key) for key in known} != pytest.approx(known, rel=1e-9):
            return False
    for name, samples in right["samples"].items():
        rows = sorted(samples, key=lambda row: row["doc_id"])
        for row, likely in zip(rows, found[name].log_likelihoods, strict=True):
            theirs = [each[0] if isinstance(each, tuple) else each for each in row["filtered_resps"]]
            if not isinstance(theirs[0], str) and list(likely) != pytest.approx(theirs, rel=1e-9):
                return False
    return True


QUIET = {"bootstrap_iters": 2}
"""Few resamplings of perplexities, whose errors are not compared."""


@mostly("post-processor")
def test_scores_are_those_of_the_harness(judge: Judge, tokenizer: Tokenizer, tasks: dict[str, str]) -> None:
    specs = [tasks[name] for name in ("choice", "shots", "cloze", "texts")]
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    found = scored(judge, tokenizer, *specs)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[:2]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert agrees(found, judge.results(specs, **QUIET))
    few = {"task_fewshot": 1, "task_limit": 7}
    assert agrees(scored(judge, tokenizer, *specs, **few), judge.results(specs, num_fewshot=1, limit=7, **QUIET))
    assert 0 < found["choice"].numbers["acc"] < 1
    assert found["choice"].num_truncated > 0
    assert len(found["shots"].log_likelihoods) == found["shots"].num_documents == 31


@pytest.mark.parametrize("adds_bos", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_scores_with_bos_of_the_run(adds_bos: bool, tasks: dict[str, str], tmp_path: Path) -> None:
    """Those of the harness on an export, whose tokenizer adds BOS as the run does, whatever its own one did."""
    tokenizer = make_tokenizer("llama", STYLES["llama"], tmp_path)
    if not adds_bos:
        library = tokenizers.Tokenizer.from_file(tokenizer.arguments["file"])
        library.post_processor = bos_template(library)
        library.save(tokenizer.arguments["file"])
        tokenizer = Tokenizer(tokenizer.arguments["file"], bos="<|begin_of_text|>")
    assert tokenizer.adds_bos is not adds_bos
    judge = Judge(tokenizer, tmp_path / "exported", adds_bos=adds_bos)
    specs = [tasks[name] for name in ("choice", "texts")]
    assert agrees(scored(judge, tokenizer, *specs), judge.results(specs, **QUIET))


@mostly("post-processor")
def test_a_group_has_the_mean_of_its_tasks(
    judge: Judge, tokenizer: Tokenizer, tasks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    init, folder = TaskManager.__init__, Path(tasks["all"]).parent
    monkeypatch.setattr(TaskManager, "__init__", lambda self, **_: init(self, None, folder, include_defaults=False))
    found = scored(judge, tokenizer, "all", "texts")
    assert agrees(found, judge.results(["all", "texts"], **QUIET))
    assert [each.num_documents for each in found.values()] == [31, 31, 9, 62]
    assert [name for name, each in found.items() if each.in_group] == ["choice", "cloze"]
    assert "acc" in found["all"].numbers


@mostly("post-processor")
def test_conversations_are_those_of_the_harness(judge: Judge, tokenizer: Tokenizer, tasks: dict[str, str]) -> None:
    specs = [tasks["shots"], tasks["cloze"]]
    found = scored(judge, tokenizer, *specs, task_chat=True)
    assert agrees(found, judge.results(specs, apply_chat_template=True, **QUIET))


@mostly("post-processor")
def test_texts_are_those_of_the_harness(judge: Judge, tokenizer: Tokenizer, tasks: dict[str, str]) -> None:
    samples = judge.results([tasks["generated"]])["samples"]["generated"]
    right = [row["resps"][0][0] for row in sorted(samples, key=lambda row: row["doc_id"])]
    assert len(set(right)) > 3
    section = ValidationConfig(enable=True, tasks=(tasks["generated"],))
    adds_bos = judge.adds_bos
    harness = Harness(section, tokenizer, seq_len=SEQ_LEN, adds_bos=adds_bos, allows_code=False, why_no_text="")
    assert harness.scores([], [], judge.greedy)["generated"].numbers["exact_match"] == 0.0
    assert [each.resps for each in harness._loaded["tasks"]["generated"].instances] == [[text] for text in right]


@pytest.fixture(scope="module")
def right_of_shots(judge: Judge, tasks: dict[str, str]) -> Any:
    return judge.results([tasks["shots"]], **QUIET)


def doubled(encode: Any) -> Any:
    def twice(encoder: Encoder, texts: Any, *, adds: bool = True) -> Any:
        found = encode(encoder, texts, adds=adds)
        return {text: [encoder._prefix, *ids] if text and adds else ids for text, ids in found.items()}

    return twice


def late(row: Any) -> Any:
    def moved(encoder: Encoder, context: Any, end: Any, where: str) -> Row:
        found: Row = row(encoder, context, end, where)
        return Row(found.tokens, min(found.begin + 1, len(found.tokens) - 1))

    return moved


def cut_at_the_end(_: Any) -> Any:
    def cut(encoder: Encoder, context: Any, end: Any, _: str) -> Row:
        tokens = np.array([*context, *end][: encoder.seq_len + 1])
        return Row(tokens, min(len(context), len(tokens) - 1))

    return cut


@mostly("post-processor")
@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        pytest.param(Encoder, "encode", doubled, id="BOS twice"),
        pytest.param(Encoder, "_row", late, id="scored one token late"),
        pytest.param(Encoder, "_row", cut_at_the_end, id="the window cuts the end"),
        pytest.param(module, "SEED", lambda _: 1235, id="other examples"),
        pytest.param(Encoder, "rows", lambda rows: lambda *given: rows(*given)[::-1], id="another order"),
    ],
)
def test_mistakes_are_detected(
    judge: Judge,
    tokenizer: Tokenizer,
    tasks: dict[str, str],
    right_of_shots: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    mistake: Any,
) -> None:
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    assert not agrees(scored(judge, tokenizer, tasks["shots"]), right_of_shots)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer("qwen", STYLES["qwen"], tmp_path_factory.mktemp("plain"))


def answered(tokenizer: Tokenizer, path: Path, losses: Sequence[float]) -> TaskScores:
    """Scores of one task, with the given loss of each choice."""
    section = ValidationConfig(enable=True, tasks=(str(path),))
    harness = Harness(section, tokenizer, seq_len=SEQ_LEN, adds_bos=False, allows_code=False, why_no_text="")
    return harness.scores(losses, [1.0] * len(losses), None)[path.stem]


def test_close_choices_are_counted_and_bits_are_those_of_the_right_answer(plain: Tokenizer, tmp_path: Path) -> None:
    """é has one character and two bytes."""
    rows = [{"context": "the", "choices": [" é", " it", " a"], "answer": index} for index in (0, 1, 0)]
    path = write_task(tmp_path / "close.yaml", rows)
    found = answered(plain, path, [1.0, 1.0 + 9e-6, 3.0, 2.0, 1.0, 1.0 + 1.1e-5, 4.0, 6.0, 4.1])
    # By characters, the third question's first two choices are close: 4 / 2 and 6 / 3.
    assert found.num_close == 2
    assert found.numbers["bits_per_byte"] == pytest.approx((1.0 + 1.0 + 4.0) / np.log(2) / (3 + 3 + 3))
    assert found.log_likelihoods[0] == (-1.0, -1.0 - 9e-6, -3.0)


CODE = "output_type: multiple_choice\nprocess_docs: !function {}.docs\ndoc_to_choice: choices\ndoc_to_target: answer\n"
RULES = {
    "code": "runs the code of .*run_me.py; if you trust it, add it to job.plugins of the run, or give .*--allow-import",
    "included code": "runs the code of .*run_me.py; if you trust it",
    "module": "runs the code of shutil; if you trust it",
    "metric": "runs the code of my_metric, a metric that lm_eval would load from the hub; if you trust it",
    "no data": r"validation.tasks: .*task.yaml cannot be used: .*nowhere.jsonl.*: a data set must be on this machine",
    "unknown name": r"validation.tasks: hellasway cannot be used: KeyError: .*: did you mean hellaswag\?",
    "group": "task.yaml is a group, which lm_eval loads by its name only: list its tasks",
    "no task": "task.yaml cannot be used: ",
    "no field": "task.yaml cannot be used: UndefinedError: 'contxt' is undefined: correct the task or its data",
    "twice": "has the task task, which another entry has, too",
    "generates": r"task generates text \(output_type: generate_until\): not in a run",
    "too long": "task, document 0: 1 to training.seq_len = 96 tokens can be scored after a context, not 2,000",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.soak) if case == "unknown name" else case for case in RULES],  # 14,000 files
)
def test_unusable_tasks_are_named(plain: Tokenizer, tmp_path: Path, case: str) -> None:
    """Before the harness runs code that was not permitted."""
    path = tmp_path / "task.yaml"
    rows: list[dict[str, Any]] = [{"context": "a", "choices": ["b", "c"], "answer": 0}]
    if case == "too long":
        rows[0]["choices"] = ["b " * 1000, "c"]
    (tmp_path / "run_me.py").write_text("raise SystemExit('it was run')")
    more = {
        "code": CODE.format("run_me"),
        "module": CODE.format("shutil"),
        "metric": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list: [{metric: my_metric}]\n",
        "generates": GENERATED,
        "included code": "output_type: multiple_choice\ninclude: base.yaml\n",
    }
    (tmp_path / "base.yaml").write_text("process_docs: !function run_me.docs\n")
    write_task(path, rows, more.get(case, ""))
    specs = {"unknown name": ("hellasway",), "twice": (str(path), str(path))}.get(case, (str(path),))
    if case == "no task":
        path.write_text("- a list\n")
    if case == "group":
        path.write_text("group: task\ntask: [a, b]\n")
    if case == "no field":
        path.write_text(path.read_text().replace("{{context}}", "{{contxt}}"))
    if case == "no data":
        path.write_text(path.read_text().replace("task.jsonl", "nowhere.jsonl"))
    section = ValidationConfig(enable=True, tasks=specs)
    with pytest.raises(UserError, match=RULES[case]):
        Harness(section, plain, seq_len=SEQ_LEN, adds_bos=False, allows_code=False, why_no_text="not in a run")


def test_an_error_while_a_task_is_scored_names_the_task(plain: Tokenizer, tmp_path: Path) -> None:
    rows = [{"context": "a", "choices": ["b", "c"], "answer": {"index": 0}}]
    path = write_task(tmp_path / "odd.yaml", rows)
    with pytest.raises(UserError, match=r"validation\.tasks: odd cannot be used: TypeError: .*: correct the task or"):
        answered(plain, path, [1.0, 2.0])


def test_an_empty_context_needs_bos_or_eos(plain: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(plain.content)
    section = ValidationConfig(
        enable=True, tasks=(str(write_task(tmp_path / "task.yaml", [{"context": "a"}], ROLLING)),)
    )
    with pytest.raises(UserError, match=r"task, document 0: the context has no tokens, .* set tokenizer\.eos"):
        Harness(
            section,
            Tokenizer(tmp_path / "tokenizer.json"),
            seq_len=SEQ_LEN,
            adds_bos=False,
            allows_code=False,
            why_no_text="",
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_gen_toks: 96", "task: max_gen_toks = 96 must be below training.seq_len = 96: write a smaller one"),
        ("temperature: 0.5", "task: generation_kwargs = .* titanlite generates greedily: remove"),
    ],
)
def test_texts_that_cannot_be_generated(plain: Tokenizer, tmp_path: Path, given: str, message: str) -> None:
    path = write_task(tmp_path / "task.yaml", [{"context": "a"}], GENERATED.replace("max_gen_toks: 9", given))
    section = ValidationConfig(enable=True, tasks=(str(path),))
    harness = Harness(section, plain, seq_len=SEQ_LEN, adds_bos=False, allows_code=False, why_no_text="")
    with pytest.raises(UserError, match=message):
        harness.scores([], [], lambda *_: iter(()))


@pytest.mark.parametrize("allows_code", [True, False])
def test_permitted_code_is_run(
    plain: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allows_code: bool
) -> None:
    """By the option, or since job.plugins has named the file."""
    (tmp_path / "first_docs.py").write_text("def docs(rows):\n    return rows.select(range(2))\n")
    rows = [{"context": "a", "choices": ["b", "c"], "answer": 0}] * 5
    path = write_task(tmp_path / "task.yaml", rows, CODE.format("first_docs"))
    if not allows_code:
        entry = f"{tmp_path.resolve() / 'first_docs.py'}@sha256:0123456789abcdef"
        monkeypatch.setattr(module, "loaded_plugins", lambda: (entry,))
    section = ValidationConfig(enable=True, tasks=(str(path),))
    harness = Harness(section, plain, seq_len=SEQ_LEN, adds_bos=False, allows_code=allows_code, why_no_text="")
    assert len(harness.rows) == 4
    assert harness.describe() == ["task, multiple_choice: 2 documents, 4 requests, 0 examples"]


FUNCTION = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\nprocess_docs: !function {}\n"
ESCAPE = "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}{{context}}"


def hostile_files(folder: Path, case: str) -> str:
    """Write a task that creates the file `pwned` if its code is run; returns the entry of validation.tasks."""
    real, pwned = folder / "real", folder / "pwned"
    (real / "lm_eval").mkdir(parents=True)
    code = f"from pathlib import Path\nPath({str(pwned)!r}).touch()\ndef f(*_, **__): return 0.0\n"
    for name in ("lm_eval/x.py", "util.py", "metric.py"):
        (real / name).write_text(code)
    (folder / "data.pickle").write_bytes(b"cbuiltins\neval\n(V__import__('os').system('touch %s')\ntR." % bytes(pwned))
    path, rows = real / "task.yaml", [{"context": "a", "choices": ["b", "c"], "answer": 0}]
    choice = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    more = {
        "include beside the target of a link": f"{choice}include: base.yaml\n",
        "name of the harness beside the target of a link": FUNCTION.format("lm_eval.x.f"),
        "function of the harness": FUNCTION.format("lm_eval.tasks._yaml_loader._import_fun_from_str"),
        "metric of a local path": f"{choice}metric_list: [{{metric: {real / 'metric'}}}]\n",
        "metric of evaluate": f"{choice}metric_list: [{{metric: acc, hf_evaluate: true}}]\n",
        "prompt": f"{choice}use_prompt: promptsource:x\n",
    }
    write_task(path, rows, more.get(case, ""))
    if case == "include beside the target of a link":
        (real / "base.yaml").write_text("process_docs: !function util.f\n")
        (folder / "base.yaml").write_text("{}\n")
    if case == "template":
        path.write_text(path.read_text().replace("{{context}}", ESCAPE.replace("PWNED", str(pwned))))
    if case == "pickled data":
        path.write_text(path.read_text().replace("dataset_path: json", "dataset_path: pandas"))
    if case == "storage of another server":
        path.write_text(path.read_text().replace("{data_files:", "{storage_options: {endpoint_url: x}, data_files:"))
    if case in DATA_KWARGS:
        path.write_text(path.read_text().replace("dataset_kwargs: {", f"dataset_kwargs: {{{DATA_KWARGS[case]}, "))
    if case == "URL in the card of a folder":
        (folder / "set").mkdir()
        (folder / "set/README.md").write_text(
            "---\nconfigs: [{config_name: x, data_files: 'http://127.0.0.1:9/x'}]\n---\n"
        )
        path.write_text(path.read_text().replace("dataset_path: json", f"dataset_path: {folder / 'set'}"))
    if case == "pipe":
        os.mkfifo(folder / "pipe.yaml")
        path.write_text(f"include: {folder / 'pipe.yaml'}\n" + path.read_text())
    if case == "in the home folder":
        path.write_text(FUNCTION.format("util.f") + path.read_text())
        path.rename(folder / "task.txt")
        (folder / "util.py").write_text(code)
        return "~/task.txt"
    (folder / "task.yaml").symlink_to(path)
    return str(folder / "task.yaml")


DATA_KWARGS = {
    "another cache": "cache_dir: /elsewhere",
    "URL": "data_dir: 'http://127.0.0.1:9/x'",
    "chain of URLs": "data_dir: 'zip://x::y'",
    "references": "field: &a [&b [*a, *a], *b, 'ftp://127.0.0.1:9/x']",
}
HOSTILE = {
    "another cache": "has dataset_kwargs that may write files or reach other servers: 'cache_dir'; leave them out; if",
    "URL": "task.yaml reads 'http://127.0.0.1:9/x', of a server or another data set: copy it here and name",
    "chain of URLs": "task.yaml reads 'zip://x::y', of a server or another data set",
    "references": "task.yaml reads 'ftp://127.0.0.1:9/x', of a server or another data set",
    "URL in the card of a folder": "task.yaml reads 'http://127.0.0.1:9/x', of a server or another data set",
    "pipe": "task.yaml cannot be used: NotRegularError",
    "include beside the target of a link": r"task.yaml runs the code of .*real/util.py; if you trust it",
    "name of the harness beside the target of a link": r"task.yaml runs the code of .*real/lm_eval/x.py; if you trust",
    "function of the harness": r"task.yaml runs the code of lm_eval.tasks._yaml_loader; if you trust it",
    "metric of a local path": r"runs the code of .*metric, a metric that lm_eval would load from the hub",
    "metric of evaluate": r"runs the code of acc, a metric that lm_eval would load from the hub",
    "prompt": r"runs the code of promptsource:x, a prompt of another file or package",
    "template": r"task.yaml cannot be used: SecurityError: access to attribute '__init__'",
    "pickled data": "task.yaml reads pickled data, which runs code: use Parquet or JSON",
    "storage of another server": "task.yaml has storage_options, which choose who gets this machine's keys of a store",
    "in the home folder": r"~/task.txt runs the code of .*util.py; if you trust it",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_task_runs_no_code_that_was_not_permitted(
    plain: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    section = ValidationConfig(enable=True, tasks=(hostile_files(tmp_path, case),))
    with pytest.raises(UserError, match=HOSTILE[case]):
        Harness(section, plain, seq_len=SEQ_LEN, adds_bos=False, allows_code=False, why_no_text="")
    assert not (tmp_path / "pwned").exists()
