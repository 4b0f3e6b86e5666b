"""Sources of conversations: what they need, and what their bad rows are called."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.conversations import TEMPLATE, write_conversations
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.check import resolve_config
from titanlite.config.ineffective import ineffective
from titanlite.config.load import parse, resolve
from titanlite.config.schema import JobConfig
from titanlite.data.chat.source import Chat, conversation
from titanlite.data.check import check_source
from titanlite.data.config import DataConfig, TokenizerConfig
from titanlite.data.corpus import ConversationEncoder, TextCorpus
from titanlite.data.fingerprint import data_fingerprint, describe_difference
from titanlite.data.kinds import open_source, source_from_path
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import PieceText
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.tools.parity.shrink import comparable_config


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """chat.jsonl, text.jsonl, and tokenizer with a chat template."""
    write_conversations(tmp_path / "chat.jsonl", [1, 2, 3])
    (tmp_path / "text.jsonl").write_text('{"text": "a document"}\n')
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def load(folder: Path, kind: str = "chat", file: str = "chat.jsonl", **settings: Any) -> JobConfig:
    values = {
        "data.sources": [{"kind": kind, "path": str(folder / file)}],
        "tokenizer.path": str(folder / "tokenizer"),
        "model.vocab_size": 300,
        "training.seq_len": 64,
        "job.dump_folder": str(folder / "out"),
    }
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    return resolve(parse([], values), world_size=1, device_type="cpu")


def problem_of(folder: Path, **settings: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    (problem,) = caught.value.problems
    return problem


def test_rows_of_the_other_kind_name_it(folder: Path) -> None:
    """Also for --data of titanlite evaluate, which takes a .jsonl as documents."""
    problem = problem_of(folder, kind="jsonl")
    assert (problem.key, problem.value) == ("data.sources.0.kind", "jsonl")
    assert "the row has 'messages'; write kind = \"chat\", or add --data.sources.0.kind chat" in problem.remedy
    problem = problem_of(folder, file="text.jsonl")
    assert (problem.key, problem.value) == ("data.sources.0.kind", "chat")
    assert problem.remedy.endswith('write kind = "jsonl", or add --data.sources.0.kind jsonl')
    found = source_from_path(str(folder / "chat.jsonl"), "--data")
    assert isinstance(found, SourceConfig)
    assert found.kind == "jsonl"


@pytest.mark.parametrize(
    ("role", "loss_on", "fault"),
    [
        ("", "assistant", "turn 1: its role is empty"),
        (
            "asistant",
            "assistant",
            "no turn has the role 'assistant', so there is nothing to train on: it has 'asistant'",
        ),
        ("asistant", "all", ""),
    ],
)
def test_a_file_without_conversations_is_refused_before_the_start(
    folder: Path, role: str, loss_on: str, fault: str
) -> None:
    bad = json.dumps({"messages": [{"role": role, "content": "a"}]}) + "\n"
    source = [{"kind": "chat", "path": str(folder / "chat.jsonl"), "loss_on": loss_on}]
    good = (folder / "chat.jsonl").read_text()
    (folder / "chat.jsonl").write_text(bad * 3)
    if fault:
        problem = problem_of(folder, data__sources=source)
        assert problem.key == "data.sources.0.path"
        assert problem.remedy.endswith(f"the first of them: {fault}")
    else:
        load(folder, data__sources=source)
    (folder / "chat.jsonl").write_text(bad * 3 + good)
    load(folder, data__sources=source)


def test_a_row_may_have_a_text_beside_its_messages(folder: Path) -> None:
    """As in published data: the text is ignored, and the row is never cut."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}]
    (folder / "chat.jsonl").write_text(json.dumps({"text": "a\n" * 1000, "messages": turns}))
    source = open_source(SourceConfig("chat", str(folder / "chat.jsonl")))
    assert isinstance(source, Chat)
    (piece,) = source.scan(folder / "chat.jsonl", 0, 100)
    text = source.read(folder / "chat.jsonl", piece)
    assert conversation(text.encode()).messages == turns
    assert source.plain_text(text) == "a"
    load(folder)


@pytest.mark.usefixtures("hugging_face_home")
def test_conversations_in_other_files_name_the_command_that_writes_lines(tmp_path: Path) -> None:
    """Also beside a column of text, which is no document."""
    (tmp_path / "files").mkdir()
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}]),
        tmp_path / "files" / "train.parquet",
    )
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "train.jsonl").write_text('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}\n')
    files = json.dumps(f"{tmp_path}/files/**/*.parquet")
    for kind, folder, given in (
        ("hf", "files", f'path="{tmp_path}/files"'),
        ("hf", "lines", f'path="{tmp_path}/lines"'),
        ("parquet", "files", f'path="parquet", data_files={files}'),
        ("chat", "files", f'path="parquet", data_files={files}'),
    ):
        (problem,) = check_source(
            SourceConfig(kind, str(tmp_path / folder)), "data.sources.0", DataConfig(), vocab_size=0, checks_files=True
        )
        assert (problem.key, problem.value) == ("data.sources.0.kind", kind)
        code = f'from datasets import load_dataset; load_dataset({given}, split="train").to_json("chat.jsonl")'
        assert problem.remedy.endswith(f'python -c \'{code}\', then kind = "chat" and path = "chat.jsonl"')


@pytest.mark.parametrize("where", ["data.sources.0", "validation.sources.0", "validation.task_chat"])
@pytest.mark.parametrize("kind", ["jsonl", "python-stdlib"])
def test_a_tokenizer_without_a_chat_template_is_named(folder: Path, where: str, kind: str) -> None:
    """Of the training, the validation and its tasks; also the tokenizer that the quick start trains."""
    (folder / "tokenizer/chat_template.jinja").unlink()
    chat = {"kind": "chat", "path": str(folder / "chat.jsonl")}
    text = {"kind": kind} | ({"path": str(folder / "text.jsonl")} if kind == "jsonl" else {})
    settings = {"data__sources": [text], "tokenizer__path": str(folder / "tokenizer") if kind == "jsonl" else ""}
    match where:
        case "data.sources.0":
            settings |= {"data__sources": [chat], "tokenizer__path": str(folder / "tokenizer")}
        case "validation.sources.0":
            settings |= {"validation__enable": True, "validation__sources": [chat]}
        case _:
            settings |= {"validation__enable": True, "validation__tasks": ["piqa"], "validation__task_chat": True}
    problem = problem_of(folder, **settings)
    assert problem.key == "tokenizer.chat_template"
    assert f"required for conversations ({where})" in problem.rule
    assert "examples/chatml.jinja" in problem.remedy


def test_templates_of_other_names_are_named(folder: Path) -> None:
    (folder / "tokenizer/chat_template.jinja").unlink()
    several = [{"name": name, "template": TEMPLATE} for name in ("rag", "tool_use")]
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    problem = problem_of(folder)
    assert problem.rule.endswith("has no chat template named 'default', only 'rag', 'tool_use'")
    assert problem.remedy.startswith("copy one of them")


def test_the_document_mask_follows_from_the_sources_unless_it_is_given(folder: Path) -> None:
    assert load(folder).data.document_mask is True
    assert load(folder, data__document_mask=False).data.document_mask is False
    assert load(folder, "jsonl", "text.jsonl").data.document_mask is False
    both = [
        {"kind": kind, "path": str(folder / f"{name}.jsonl")} for kind, name in (("jsonl", "text"), ("chat", "chat"))
    ]
    config = load(folder, data__sources=both)
    assert config.data.document_mask is True
    assert resolve_config(config, world_size=1, device_type="cpu") == config


def test_the_model_folder_of_the_start_has_the_tokenizer(folder: Path) -> None:
    """checkpoint.initial_load_path = "hf:FOLDER" suffices."""
    problem = problem_of(folder, tokenizer__path="", checkpoint__initial_load_path=f"hf:{folder / 'tokenizer'}")
    assert problem.key == "checkpoint.initial_load_path"  # only: it has no config.json
    assert problem_of(folder, tokenizer__path="").key == "tokenizer.path"
    with pytest.raises(
        ConfigError, match=r"organization/model is not a folder with a tokenizer(.|\n)* hf download NAME"
    ):
        load(folder, tokenizer__path="", checkpoint__initial_load_path="hf:organization/model")
    start = CheckpointConfig(initial_load_path=f"hf:{folder / 'tokenizer'}")
    compared = comparable_config(replace(load(folder), tokenizer=TokenizerConfig(), checkpoint=start), ranks=4)
    assert compared.tokenizer.path == str(folder / "tokenizer")


def test_separators_have_no_effect_on_conversations(folder: Path) -> None:
    keys = ("data.add_eos", "data.max_piece_bytes")
    given = dict.fromkeys(keys, "config.toml")
    for kind, file, count in (("chat", "chat.jsonl", 2), ("jsonl", "text.jsonl", 0)):
        changes = {"add_eos": False, "max_piece_bytes": 100}
        config = load(folder, kind, file)
        config = replace(config, data=replace(config.data, **changes))
        found = ineffective(config, config, given, 1)
        assert [problem.key for problem in found] == list(keys[:count])
        assert all("not of tokens or conversations" in problem.rule for problem in found)


def test_a_bad_row_is_named_by_file_line_and_turn(folder: Path) -> None:
    file = folder / "chat.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": 3}]
    nul = [{"role": "user", "content": "a\0"}, {"role": "assistant", "content": "b"}]
    rows = [b"\xff", b"{", *(json.dumps({"messages": each}).encode() for each in (turns, [], nul))]
    file.write_bytes(b"\n".join([file.read_bytes().rstrip(), *rows]))
    source = open_source(SourceConfig("chat", str(file)))
    assert isinstance(source, TextSource)
    texts = TextCorpus([source], 16)
    assert texts.counts == (8,)  # never cut, though max_piece_bytes is 16
    encoder = ConversationEncoder(Tokenizer(folder / "tokenizer/tokenizer.json"), "assistant")
    found = encoder.encode([PieceText(0, texts.read(n), lambda: iter(())) for n in range(8)], texts.locate)
    assert all(not isinstance(piece, Exception) for piece in found[:3])
    errors = [str(piece) for piece in found[3:]]
    assert errors[0].startswith(f"{file}, line 4: invalid UTF-8 at byte 0")
    assert errors[1].startswith(f"{file}, line 5: invalid JSON at character 1")
    assert errors[2] == f"{file}, line 6: turn 3: its content is not text but a number"
    assert errors[3] == f"{file}, line 7: 'messages' is empty"
    assert texts.plain_text(0) == "question 0\nword "
    assert str(texts.plain_text(5)) == errors[2]
    assert errors[4] == f"{file}, line 8: turn 1: it has a NUL character, which text does not have"
    assert str(texts.plain_text(7)) == f"{file}, line 8: a NUL character at byte 1, which text does not have"


def test_the_template_and_the_keys_are_facts_of_the_source(folder: Path) -> None:
    def facts(**keys: Any) -> dict[str, Any]:
        source = SourceConfig("chat", str(folder / "chat.jsonl"), **keys)
        tokenizer = Tokenizer(folder / "tokenizer/tokenizer.json")
        return data_fingerprint(DataConfig(sources=(source,)), [open_source(source)], tokenizer)

    before = facts()
    assert not before.keys() & {"add_bos", "add_eos", "max_piece_bytes"}
    (difference,) = describe_difference(before, facts(loss_on="all", too_long="skip"))
    assert difference.endswith('loss_on "assistant" -> "all"; too_long "truncate" -> "skip"')
    (folder / "tokenizer/chat_template.jinja").write_text(TEMPLATE + "\n")
    (difference,) = describe_difference(before, facts())
    assert difference.endswith(": the chat template differs")
