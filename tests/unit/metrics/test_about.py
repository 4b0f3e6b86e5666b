"""The id of a run, its starts, and the commit of the current folder."""

import json
import subprocess
from pathlib import Path

import pytest

from titanlite.metrics.about import git_commit, note_start


def test_a_resumed_run_keeps_its_id_and_lists_its_starts(tmp_path: Path) -> None:
    run_id = note_start(tmp_path, 0, {"hosts": "a"})
    assert note_start(tmp_path, 20, {"hosts": "b"}) == run_id
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["run_id"] == run_id
    assert [(start["step"], start["hosts"]) for start in run["starts"]] == [(0, "a"), (20, "b")]
    assert note_start(tmp_path / "..", 0, {}) != run_id


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"run_id": 1, "starts": []}', b"\xff"])
def test_a_damaged_file_is_a_new_id_and_a_warning(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    run_id = note_start(tmp_path, 20, {})
    assert json.loads((tmp_path / "run.json").read_text())["run_id"] == run_id
    assert "lost or damaged" in caplog.text


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_git(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "inside").mkdir(parents=True)
    git(top, "init", "-b", "trunk/a")
    assert git_commit(top) is None
    git(top, "commit", "--allow-empty", "-m", "one")
    commit = git(top, "rev-parse", "HEAD")
    assert git_commit(top) == git_commit(top / "inside") == commit
    git(top, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    assert git_commit(tmp_path / "tree") == commit
    git(top, "pack-refs", "--all")
    assert git_commit(top) == git_commit(tmp_path / "tree") == commit
    git(top, "checkout", "--detach")
    assert git_commit(top) == commit


@pytest.mark.parametrize("head", [None, "", "ref: refs/heads/lost", "ref: ../../x", "abc", "\udcff"])
def test_damaged_repositories_have_no_commit(tmp_path: Path, head: str | None) -> None:
    (tmp_path / ".git").mkdir()
    if head is not None:
        (tmp_path / ".git" / "HEAD").write_bytes(head.encode(errors="surrogateescape"))
    assert git_commit(tmp_path) is None


def test_files_in_the_way_of_a_repository_have_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert git_commit(tmp_path) is None
    assert git_commit(Path("/")) is None
