"""The [storage] section."""

from dataclasses import dataclass
from typing import ClassVar

from titanlite.runtime.settings import Affects, setting


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
