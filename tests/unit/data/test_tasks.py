"""Task files: rows that are refused, and the tokens of contexts and choices."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.unit.data.chat.chat_templates import SPECIAL, STYLES, make_tokenizer
from titanlite.data.bpe import train_bpe
from titanlite.data.tasks import EncodedTask, check_tasks, encode_task, read_task
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

TEXT = "the model reads, and it says: größer 東京\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer without BOS, and in `with_bos` one whose post-processor adds EOS's token before texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter([TEXT] * 4), 290, folder)
    library = Library.from_file(str(folder / "tokenizer.json"))
    first = library.id_to_token(0)
    library.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    (folder / "with_bos").mkdir()
    library.save(str(folder / "with_bos" / "tokenizer.json"))
    return folder


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = {"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7}
CHAT = {"messages": [{"role": "user", "content": "a"}], "answer": "b"}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "the row is not JSON"),
        ("", "the row is blank"),
        ({"choices": ["a", "b"], "answer": 0}, "has none of 'context' and 'messages': write "),
        ({}, "has none of 'context' and 'messages': write "),
        ({"context": "a", "choices": ["a", "b"]}, "has a fault at 'answer' (Field required): write "),
        (GOOD | {"context": None}, "has a fault at 'context' (Input should be a valid string)"),
        (GOOD | {"answer": "B"}, "has a fault at 'answer' (Input should be a valid integer)"),
        (GOOD | {"answer": True}, "has a fault at 'answer'"),
        (GOOD | {"answer": 1.0}, "has a fault at 'answer'"),
        (GOOD | {"answer": 2}, "has answer 2 for 2 choices: write an index from 0 to 1"),
        (GOOD | {"answer": -1}, "has a fault at 'answer' (Input should be greater than or equal to 0)"),
        (GOOD | {"choices": ["a"]}, "has a fault at 'choices' (List should have at least 2 items"),
        (GOOD | {"choices": "ab"}, "has a fault at 'choices'"),
        (GOOD | {"choices": ["a", ""]}, "has a fault at 'choices', item 1 (String should have at least 1 character"),
        (GOOD | {"choices": ["a", {}]}, "has a fault at 'choices', item 1"),
        (GOOD | {"context": "a\ud800"}, "has a fault at 'context' (Input should be a valid string, unable to parse"),
        (GOOD | {"choices": ["a", "\udfff"]}, "has a fault at 'choices', item 1 (Input should be a valid string, un"),
        (GOOD | CHAT, "has both 'context' and 'messages'"),
        (CHAT | {"messages": []}, "has messages that cannot be used: 'messages' is empty"),
        (CHAT | {"messages": [{"role": "user"}]}, "has messages that cannot be used: turn 1: its content is missing"),
        (CHAT | {"messages": [{"role": "assistant", "content": "a"}]}, "has messages that end with a turn of the"),
        ({"context": "a", "answer": 3}, "has a fault at 'answer' (Input should be a valid string)"),
        ({"context": "a", "answer": "b"}, "is cloze, and line 1 is multiple choice"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, row: Any, fault: str) -> None:
    path = write(tmp_path / "task.jsonl", GOOD, row, GOOD)
    with pytest.raises(UserError) as caught:
        read_task(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert fault in str(caught.value)
    (problem,) = check_tasks("validation.tasks", [str(path)])
    assert (problem.key, problem.value) == ("validation.tasks", str(path))
    assert fault in problem.remedy


def test_files_without_questions_and_equal_names_are_problems(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    good, same, empty = (tmp_path / name for name in ("one.jsonl", "other/one.json", "empty.jsonl"))
    write(good, GOOD, "", " \r")  # blank lines at the end
    write(same, {"context": "", "answer": "é"})
    good.write_bytes(BOM_UTF8 + good.read_bytes())
    empty.write_bytes(BOM_UTF8)
    assert (read_task(good).name, len(read_task(good).questions)) == ("one", 1)
    (tmp_path / "ends.jsonl").write_bytes(b"\r".join([json.dumps(GOOD).encode()] * 3))
    assert len(read_task(tmp_path / "ends.jsonl").questions) == 3
    problems = check_tasks("validation.tasks", [*map(str, (good, same, empty)), str(tmp_path / "none")])
    assert [problem.value for problem in problems] == [str(same), str(empty), str(tmp_path / "none")]
    assert ["'one' is there twice" in problem.rule for problem in problems] == [True, False, False]
    assert "has no questions" in problems[1].remedy
    assert "No such file" in problems[2].remedy


def encoded(folder: Path, path: Path, seq_len: int = 100, **tokens: str) -> tuple[Tokenizer, EncodedTask]:
    tokenizer = Tokenizer(folder / "tokenizer.json", **tokens)
    return tokenizer, encode_task(read_task(path), tokenizer, seq_len=seq_len, add_bos=bool(tokens))


def texts(tokenizer: Tokenizer, task: EncodedTask) -> list[tuple[str, str]]:
    """(context, scored text) of each row"""
    rows = [(row.tokens.tolist(), row.begin) for row in task.rows]
    return [(tokenizer.decode(tokens[:begin]), tokenizer.decode(tokens[begin:])) for tokens, begin in rows]


def test_rows_are_divided_as_by_lm_eval(folder: Path, tmp_path: Path) -> None:
    """Both texts are encoded as one; whitespace at the end of the context is scored with the choice."""
    question = {"context": "the model ", "choices": ["reads", "größer, 東京"], "answer": 0}
    path = write(tmp_path / "one.jsonl", question, {"context": "", "choices": ["it", "says"], "answer": 0})
    tokenizer, task = encoded(folder, path)
    assert tokenizer.eos_id is not None
    eos = tokenizer.decode([tokenizer.eos_id])
    assert tokenizer.prefix_ids == ()
    assert texts(tokenizer, task) == [
        *(("the model", " reads"), ("the model", " größer, 東京")),
        *((eos, "it"), (eos, "says")),
    ]
    both = tokenizer.encode("the model reads")
    assert task.rows[0].tokens.tolist() == both
    assert both[task.rows[0].begin :] == tokenizer.encode(" reads")
    split = write(tmp_path / "split.jsonl", {"context": "the mo", "answer": "del"})
    with pytest.raises(UserError, match=r"split\.jsonl, line 1: 'del' has no tokens of its own"):  # one token: model
        encoded(folder, split)


def test_contexts_begin_as_the_tokenizer_or_the_run_defines(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", {"context": "it says", "answer": ": the"})
    plain = encoded(folder, path)[1].rows[0]
    for found, settings in ((folder / "with_bos", {}), (folder, {"bos": ","}), (folder / "with_bos", {"bos": ","})):
        tokenizer, task = encoded(found, path, **settings)
        first = 0 if found != folder else tokenizer.bos_id
        assert task.rows[0].tokens.tolist() == [first, *plain.tokens]
        assert task.rows[0].begin == plain.begin + 1
        assert tokenizer.prefix_ids == ((0,) if found != folder else ())
    rows = [{"context": "", "answer": answer} for answer in ("the", ", the")]
    tokenizer, task = encoded(folder, write(tmp_path / "empty.jsonl", *rows), bos=",")
    assert tokenizer.bos_id != tokenizer.eos_id
    expected = [[tokenizer.bos_id, *tokenizer.encode("the")], tokenizer.encode(", the")]
    assert [(row.tokens.tolist(), row.begin) for row in task.rows] == [(tokens, 1) for tokens in expected]


def test_long_contexts_lose_their_beginning(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", *({"context": "the model " * n, "answer": "reads it"} for n in (1, 9)))
    _, entire = encoded(folder, path)
    _, cut = encoded(folder, path, seq_len=6)
    assert (entire.truncated, cut.truncated) == (0, 1)
    assert cut.rows[0].tokens.tolist() == entire.rows[0].tokens.tolist()
    assert cut.rows[1].tokens.tolist() == entire.rows[1].tokens.tolist()[-7:]
    assert cut.rows[1].tokens[cut.rows[1].begin :].tolist() == entire.rows[1].tokens[entire.rows[1].begin :].tolist()
    assert cut.describe() == "one, cloze: 2 questions, 2 rows, 1 with a truncated context"
    assert [row.begin for row in encoded(folder, path, seq_len=2)[1].rows] == [1, 1]
    with pytest.raises(UserError, match=r"line 1: 2 tokens of a choice are more than training.seq_len = 1: shorten"):
        encoded(folder, path, seq_len=1)
    empty = write(tmp_path / "empty.jsonl", {"context": "", "answer": "a"})
    with pytest.raises(UserError, match="the context is empty, and the tokenizer has neither BOS nor EOS"):
        encoded(folder / "with_bos", empty)
    blank = write(tmp_path / "blank.jsonl", {"context": " \n", "answer": "a"})
    with pytest.raises(UserError, match=r"blank\.jsonl, line 1: the context has no tokens"):
        encoded(folder, blank)


@pytest.mark.parametrize("style", STYLES)
def test_conversations_are_written_by_the_chat_template(style: str, tmp_path: Path) -> None:
    """The prompt of transformers with the choice, as one text. Special tokens in a question or choice stay text."""
    tokenizer = make_tokenizer(style, STYLES[style], tmp_path)
    special = SPECIAL[style][0]
    questions = [[{"role": "user", "content": text}] for text in ("the model reads", f"a {special}")]
    choices = ["reads", "words é\n", special]
    rows = [{"messages": messages, "choices": choices, "answer": 0} for messages in questions]
    path = write(tmp_path / "one.jsonl", *rows, {"context": "the model", "choices": ["a", "b"], "answer": 0})
    task = encode_task(read_task(path), tokenizer, seq_len=200, add_bos=False)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=STYLES[style], **tokenizer.special_tokens
    )
    prompt = theirs.apply_chat_template(questions[0], add_generation_prompt=True, tokenize=False)
    for row, choice in zip(task.rows[:2], choices, strict=False):
        assert row.tokens.tolist() == theirs.encode(prompt + choice, add_special_tokens=False)
        assert row.begin == len(theirs.encode(prompt, add_special_tokens=False))
    first = theirs.convert_tokens_to_ids(special)
    counts = [row.tokens.tolist().count(first) for row in task.rows]
    assert len({*counts[:6]}) == 1, "a special token of a message or choice was found"
    assert counts[6:] == [0, 0]


def test_conversations_need_a_chat_template(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", CHAT)
    with pytest.raises(UserError, match=r"one\.jsonl has questions with messages: the tokenizer has no chat template"):
        encoded(folder, path)
    tokenizer = make_tokenizer("mistral", STYLES["mistral"], tmp_path)
    two = write(tmp_path / "two.jsonl", {"messages": CHAT["messages"] * 2, "answer": "b"})
    with pytest.raises(UserError, match=r"two\.jsonl, line 1: .*roles must alternate"):
        encode_task(read_task(two), tokenizer, seq_len=100, add_bos=False)
    tokenizer = make_tokenizer(
        "qwen", "a{% if add_generation_prompt %} the mod{% endif %}", tmp_path
    )  # one token: model
    three = write(tmp_path / "three.jsonl", CHAT | {"answer": "el reads"})
    with pytest.raises(UserError, match=r"three\.jsonl, line 1: .* and 'el reads' are encoded to common tokens: begin"):
        encode_task(read_task(three), tokenizer, seq_len=100, add_bos=False)


def test_the_chat_template_writes_all_of_a_question_and_a_prompt(tmp_path: Path) -> None:
    """Without a prompt, a choice would follow the user's turn, and calls that are not written would be lost."""
    path = write(tmp_path / "one.jsonl", CHAT)
    without = STYLES["qwen"][: STYLES["qwen"].rindex("{%- if add_generation_prompt")]
    with pytest.raises(
        UserError, match=r"one\.jsonl has .*: the chat template does not write what is before an answer"
    ):
        encode_task(read_task(path), make_tokenizer("qwen", without, tmp_path), seq_len=100, add_bos=False)
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    write(path, CHAT | {"messages": [*CHAT["messages"], called, {"role": "tool", "content": "1"}]})
    tokenizer = make_tokenizer("qwen", STYLES["qwen"], tmp_path)
    with pytest.raises(UserError, match=r"one\.jsonl, line 1: turn 2: it has tool_calls, which the chat template does"):
        encode_task(read_task(path), tokenizer, seq_len=100, add_bos=False)
