"""Check blocks without running them: the syntax, options of titanlite's commands, keys of the configuration."""

import ast
import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import yaml
from torch.distributed.run import parse_args

from tests.configuration import parse_config
from tests.documentation.blocks import Block
from tests.documentation.manifests import dockerfile_problems, manifest_commands, manifest_problems, scripts
from titanlite.__main__ import COMMANDS
from titanlite.runtime.errors import UserError
from titanlite.tools.command import read_options, read_options_and_overrides
from titanlite.tools.completion.__main__ import OPTIONS
from titanlite.tools.sweep.combinations import split_values

OPERATORS = "();<>|&"
KEYWORDS = {"do", "then", "else", "!"}
SLURM = "scripts/slurm.sbatch"
OUTPUTS = "outputs/"
"""Dump folders: a CONFIG in one is written by a run."""


def problems_of(block: Block) -> list[str]:
    """The problems of a block, in the current folder, which has the files that the block names."""
    if problem := _syntax_problem(block):
        return [problem]
    if block.language == "yaml" and block.tag == "cluster":
        found = list(manifest_problems(block.text))
        return found or _command_problems(manifest_commands(block.text))
    if block.language == "dockerfile":
        found = list(dockerfile_problems(block.text))
        return found or _command_problems(words for script in scripts(block.text) for words in commands(script))
    if block.language == "toml" and block.tag != "syntax":
        path = Path(block.file or f"line-{block.line}.toml")
        path.write_text(block.text, "utf-8")
        return [str(problem) for problem in parse_config([str(path)])[1]]
    return _command_problems(commands(block.text) if block.language == "bash" else ())


def _command_problems(found: Iterable[Sequence[str]]) -> list[str]:
    return [f"{shlex.join(words)}: {problem}" for words in found if (problem := command_problem(words))]


def _syntax_problem(block: Block) -> str:
    try:
        match block.language:
            case "bash" | "dockerfile":
                script = block.text if block.language == "bash" else "\n".join(scripts(block.text))
                return subprocess.run(["bash", "-n"], input=script, stderr=subprocess.PIPE, text=True).stderr
            case "python":
                ast.parse(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "yaml":
                list(yaml.safe_load_all(block.text))
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return str(error)
    return ""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script, without redirections, keywords and the variables before it."""
    pending = ""
    for line in re.sub(r"(?<=\s)\d(?=[<>])", "", text.replace("\\\n", " ")).splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=OPERATORS)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that ends in a later line
            continue
        pending = ""
        yield from filter(None, _split(words))


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    is_target = False
    for word in words:
        if set(word) <= {*OPERATORS}:
            is_target = not {*"<>"}.isdisjoint(word)
            if not is_target:
                yield command
                command = []
        elif is_target:
            is_target = False
        elif command or not (word in KEYWORDS or re.match(r"\w+=", word)):
            command.append(word)
    yield command


def command_problem(words: Sequence[str]) -> str:
    """What is wrong with the options of the titanlite command that these words start; "" for other programs."""
    match list(words):
        case ["titanlite", *arguments] | ["python", "-m", "titanlite", *arguments]:
            return _options_problem(arguments)
        case ["python", "-m", "titanlite.train", *arguments] | ["./run_train.sh", *arguments]:
            return _config_problem(arguments or ["quickstart"])
        case ["sbatch", *arguments] if SLURM in arguments:
            return _config_problem(arguments[arguments.index(SLURM) + 1 :])
        case ["torchrun", *arguments] | ["python", "-m", "titanlite.torchrun", *arguments]:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stderr(printed):
                    given = parse_args(arguments)
            except SystemExit:
                return printed.getvalue()
            started = ["-m"] if given.module else []
            return command_problem(["python", *started, given.training_script, *given.training_script_args])
    return ""


def _options_problem(arguments: Sequence[str]) -> str:
    """arguments: those of titanlite."""
    command, *rest = arguments or ["--help"]
    if command.startswith("-"):
        return ""
    if command not in COMMANDS:
        return f"the commands are {', '.join(COMMANDS)}"
    if command == "train":
        return _config_problem(rest)
    kind = OPTIONS[command]
    try:
        if get_args(kind):
            options, overrides, problems = read_options(kind, rest, command), [], []
        else:
            options, overrides, problems = read_options_and_overrides(kind, rest, command)
    except UserError as error:
        return str(error)
    if problems:
        return "\n".join(map(str, problems))
    config = getattr(options, "config", "")
    if overrides and not config and command != "evaluate":
        return f"{command} takes no {overrides[0]}"
    given = [config, *overrides] if config else overrides
    if command != "sweep":
        return _config_problem(given)
    parts = [word.partition("=") for word in given]
    values = [[f"{name}{equals}{value}" for value in split_values(text)] for name, equals, text in parts]
    runs = [[each[min(number, len(each) - 1)] for each in values] for number in range(max(map(len, values)))]
    return next(filter(None, map(_config_problem, runs)), "")


def _config_problem(arguments: Sequence[str]) -> str:
    """arguments: those of a training."""
    argv = [word for word in arguments if not (word.startswith(OUTPUTS) and word.endswith(".toml"))]
    return "\n".join(map(str, parse_config(argv)[1]))
