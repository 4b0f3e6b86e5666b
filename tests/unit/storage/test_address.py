"""Names that others chose: which are paths below a folder. Addresses and URLs with passwords are refused, unshown."""

from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.storage.address import path_below, place
from titanlite.storage.config import StorageConfig, check_storage


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "a\\b", "a\0", "a\nb", "a\x9b", "\udc80"]
)
def test_names_of_others_that_are_no_paths_below_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"is not the name of a file below .*: it is neither read nor written") as error:
        path_below(tmp_path, name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a/b", ".a", "..a", "a..", "...", "a b/c?#*", "é\u200d漢"])
def test_names_of_others_that_are_paths_below_a_folder(tmp_path: Path, name: str) -> None:
    assert path_below(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("userinfo", ["key:hidden", "hidden", "key:hid/hidden", ":hidden", "key:a@hidden"])
@pytest.mark.parametrize("protocol", ["s3", "gs", "memory", "ftp"])
def test_keys_in_an_address_are_refused_and_not_shown(protocol: str, userinfo: str) -> None:
    with pytest.raises(UserError, match=r"'\w+://\*\*\*@bucket/run' is not ") as error:
        place(f"{protocol}://{userinfo}@bucket/run")
    assert "hid" not in str(error.value)
    assert protocol == "ftp" or "without keys, user name and password: write" in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *("s3://bucket/a@b/c:d@e", "az://container@account.blob.core.windows.net/a"),
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/a@b",
    ],
)
def test_other_addresses_with_an_at_sign_are_valid(text: str) -> None:
    assert str(place(text)) == text


@pytest.mark.parametrize("endpoint", ["http://key:hidden@host", "key:hidden@host:9", "https://hidden@host/"])
def test_a_password_in_the_endpoint_is_refused_and_not_shown(endpoint: str) -> None:
    (problem,) = check_storage(StorageConfig(endpoint=endpoint))
    assert "a URL without user name and password" in str(problem)
    assert "hidden" not in str(problem)


def test_no_password_is_in_the_problems_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLITE_STORAGE", "{}")  # a configuration that is read replaces it, also for later tests
    arguments = [
        "--storage.endpoint",
        "http://key:hidden@host",
        "--checkpoint.folder",
        "s3://key:hid/hidden@bucket/run",
    ]
    arguments += ["--job.dump_folder", "https://hidden@host/x"]
    for checks_files in (True, False):
        with pytest.raises(ConfigError, match=r"storage\.endpoint\n") as error:
            load_config(arguments, world_size=1, device_type="cpu", checks_files=checks_files)
        assert "hid" not in str(error.value)
