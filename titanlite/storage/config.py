"""The [storage] section."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, setting
from titanlite.storage.address import KEYS


@dataclass(frozen=True)
class StorageConfig:
    """How object stores are reached. Keys and tokens come from the environment or the profile of the store's client,
    never from here."""

    AFFECTS: ClassVar[Affects] = "nothing"

    endpoint: str = setting("", per_node=True)
    """URL of the server, for stores other than the provider's own; empty: that of the client, as AWS_ENDPOINT_URL."""
    region: str = setting("", per_node=True)
    """Region of the buckets of s3://; empty: that of the client, as AWS_REGION."""
    profile: str = setting("", per_node=True)
    """Profile of the credentials of s3://; empty: that of the client, as AWS_PROFILE."""
    anonymous: bool = False
    """Read public buckets without credentials."""
    ca_file: str = setting("", per_node=True, is_path=True)
    """Certificates of the authorities to trust for s3://, in a PEM file; empty: those of the system."""
    timeout_s: int = setting(60, least=1, most=3600)
    """Seconds without an answer after which a request counts as failed. It is then repeated, up to six times."""


def check_storage(section: StorageConfig) -> list[Problem]:
    """Return the problems of [storage]."""
    rules = Rules("storage", section)
    is_url = section.endpoint.startswith(("http://", "https://"))
    if "@" in section.endpoint:  # the run's files would keep it, and the message does not show it
        rule = "a URL without user name and password"
        rules.problems.append(Problem("storage.endpoint", None, rule, f"http://HOST:PORT; {KEYS}"))
    else:
        rules.require("endpoint", not section.endpoint or is_url, "a URL", "http://HOST:PORT, or https://HOST")
    is_file = not section.ca_file or Path(section.ca_file).is_file()
    rules.require("ca_file", is_file, "a file of certificates", "the path of a PEM file")
    return rules.problems
