"""Addresses of objects in a store, such as s3://bucket/run: the counterpart of Path for folders that are no folders;
names that others chose."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from titanlite.runtime.errors import UserError
from titanlite.runtime.text import without_userinfo

EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "memory": ""}
"""Protocol of an address -> the extra of titanlite that installs its client; "": none is needed."""
KINDS = "s3://, gs://, az:// or memory://"
KEYS = "the store's client takes keys from the environment, as AWS_ACCESS_KEY_ID, or from storage.profile"

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_UNSAFE = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|[\\\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MEANT = re.compile(rf"[a-z][a-z0-9+.-]*://|({'|'.join(EXTRAS)}):", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Whether the text is meant as a place in a store, of any protocol, and not as a path; see address_problem."""
    return _MEANT.match(text) is not None


def address_problem(text: str) -> tuple[str, str] | None:
    """The rule that an address breaks, and a remedy; None if it is valid."""
    found = _ADDRESS.fullmatch(text)
    if found is None or found[1] not in EXTRAS:
        return "the address of a store", f"begin it with {KINDS}"
    protocol, path = found.groups()
    if without_userinfo(text) != text and not (protocol == "az" and ":" not in path.partition("@")[0]):
        return "an address without keys, user name and password", f"write {protocol}://BUCKET/NAME; {KEYS}"
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\0-\x1f?#]", path):
        return 'an address without empty parts, ".", "..", "?" and "#"', f"write {protocol}://BUCKET/NAME"
    return None


@dataclass(frozen=True, order=True)
class Address:
    """A place in a store: of one object, or of all objects below it. path: bucket and key, without "/" at the end."""

    protocol: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises UserError if it is not a valid address of a store that titanlite knows."""
        if problem := address_problem(text):
            raise UserError(f"{without_userinfo(text)!r} is not {problem[0]}: {problem[1]}")
        protocol, _, path = text.partition("://")
        return cls(protocol, path.rstrip("/"))

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The place that contains it; a bucket is its own parent."""
        return Address(self.protocol, self.path.rpartition("/")[0] or self.path)

    def with_name(self, name: str) -> "Address":
        return self.parent / name

    def is_relative_to(self, other: "Address") -> bool:
        """Whether it is `other` or lies below it."""
        return self.protocol == other.protocol and f"{self.path}/".startswith(f"{other.path}/")

    def __truediv__(self, name: str) -> "Address":
        return Address(self.protocol, f"{self.path}/{name}")

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"


Place = Path | Address
"""A folder or file: local, or in a store."""


def is_below(text: str) -> bool:
    """Whether a setting names a folder below the one that it is relative to."""
    path = PurePath(text)
    return not (is_address(text) or path.is_absolute() or ".." in path.parts)


def place(text: str, folder: str | Path = "") -> Place:
    """The place that a setting names: an address, or a path, which is relative to `folder`. Raises UserError."""
    return Address.parse(text) if is_address(text) else Path(folder, text)


def is_safe_name(name: str) -> bool:
    """Whether a relative name, which others chose, is one line of text and leads to a place below any folder.

    Its parts are not "", "." or "..", and it has no backslash, control character, line separator or unpaired surrogate.
    """
    return not _UNSAFE.search(name)


def path_below(folder: Path, name: str) -> Path:
    """The path of a relative name, which others chose, in `folder`. Raises UserError if it would lead elsewhere."""
    if not is_safe_name(name):
        raise UserError(f"{name!r} is not the name of a file below {folder}: it is neither read nor written")
    return folder / name
