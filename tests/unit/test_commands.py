"""The commands: listed without importing torch, and started by their names."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite
from titanlite import __main__
from titanlite.__main__ import COMMANDS
from titanlite.tools.completion import __main__ as completion


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import runpy, sys; runpy.run_module('titanlite', run_name='__main__'); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_commands_are_listed_without_torch(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:-2]] == list(COMMANDS)


@pytest.mark.parametrize("name", [module for module, _ in COMMANDS.values()])
def test_each_command_is_a_runnable_module(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin)
    source = (file.with_name("__main__.py") if file.name == "__init__.py" else file).read_text()
    last = ast.parse(source).body[-1]  # after all that the command uses
    assert ast.unparse(last).startswith("if __name__ == '__main__':")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_all_commands_options_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        completion.main([shell])
    assert not caught.value.code
    script = capsys.readouterr().out
    expected = [*COMMANDS, "max-new-tokens", "world-size", "training.seq_len", "export"]
    assert [word for word in expected if word not in script] == []
    assert "no-no-" not in script


def test_completion_knows_every_command() -> None:
    assert set(completion.OPTIONS) == set(COMMANDS)


SHELL = "--tyro-print-completion needs the name of a shell: bash, zsh, fish"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tokenise config.toml", "unknown command 'tokenise': did you mean tokenize?"),
        ("--foo", "unknown option '--foo': see titanlite --help"),
        *((f"--tyro-print-completion {shells}", SHELL) for shells in ("", "tcsh", "bash zsh")),
    ],
)
def test_what_names_no_command_is_refused(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["titanlite", *words.split()])
    with pytest.raises(SystemExit) as caught:
        __main__.run()
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"titanlite: {message}\n")


@pytest.mark.parametrize(
    "words", [["--tyro-print-completion", "zsh"], ["--tyro-print-completion=zsh"], ["--tyro_print_completion", "zsh"]]
)
def test_spellings_of_completion(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(__main__, "run_module", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "argv", ["titanlite", *words])
    __main__.run()
    assert started == [("titanlite.tools.completion", ["zsh"])]


def test_programs_handle_ctrl_c_before_they_import_torch() -> None:
    """And collect no garbage while they import it."""
    block = '\nif __name__ == "__main__":  # before the imports that take seconds\n'
    package = Path(__main__.__file__).parent
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    halves = {name: text.split(block, 1) for name, text in texts.items() if block in text}
    starts = {name: start for name, (start, rest) in halves.items() if "    prepare_process()\n\n" in rest}
    assert starts.keys() == {"train.py", "torchrun/__main__.py", "tools/evaluate.py", "tools/profile.py"}
    checks = ["import gc, sys", "assert 'torch' not in sys.modules", "prepare_process()", "assert not gc.isenabled()"]
    checks.append("with FailureReport(): assert gc.isenabled() and gc.get_freeze_count()")
    program = "\n".join([*starts.values(), *checks])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_options_of_commands_need_no_torch() -> None:
    program = "import sys, titanlite.tools.ledger; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


SWALLOWED_INTERRUPT = """
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    except BaseException:  # as the import of torch, now and then
        pass
"""


@pytest.mark.parametrize(
    ("event", "code", "text"),
    [(SWALLOWED_INTERRUPT, 130, "\ntitanlite: interrupted\n"), ("\n    raise BrokenPipeError\n", 1, "")],
)
def test_an_interrupt_while_a_command_is_imported(event: str, code: int, text: str) -> None:
    program = f"""
import os, runpy, signal, sys, time
from titanlite import __main__
def run_module(*_, **__):{event}
runpy.run_module = run_module
sys.argv[1:] = ["plan"]
__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, text)


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"titanlite {titanlite.__version__}\n"


def test_the_table_has_all_tools() -> None:
    """All runnable modules of tools/, except those that write a docs page or a completion script, and workers."""
    tools = Path(titanlite.__file__).with_name("tools")
    files = [path for path in tools.rglob("*.py") if "__main__" in path.read_text()]
    names = {path.parent.name if path.name == "__main__.py" else path.stem for path in files}
    listed = {module.rpartition(".")[2] for module, _ in COMMANDS.values()} - {"train"}
    assert names == listed | {"config_page", "completion", "local", "rehearsal"}


PRINTS = "from titanlite.tools.command import run_command; run_command(lambda _: print(TEXT))"
LOGS = """
from titanlite.ranks.failure import FailureReport
from titanlite.runtime.logging import log, setup_logging
with FailureReport():
    setup_logging(0)
    log.info(TEXT)
"""


@pytest.mark.parametrize("program", [PRINTS, LOGS])
@pytest.mark.parametrize(("encoding", "written"), [("ascii", r"\xe9\u4f60\udcff"), ("latin-1", r"é\u4f60\udcff")])
def test_characters_that_the_encoding_lacks_are_escaped(program: str, encoding: str, written: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    words = [sys.executable, "-c", program.replace("TEXT", r"'\xe9\u4f60\udcff'")]
    done = subprocess.run(words, env=environment, capture_output=True, encoding="latin-1", check=True, timeout=60)
    assert (done.stdout.strip().endswith(written), done.stderr) == (True, "")
