"""What a store lets this process do below an address: a small object is written, read, listed and deleted."""

import uuid
from collections.abc import Callable
from contextlib import suppress

from titanlite.runtime.errors import UserError
from titanlite.storage.store import Store, is_denied

_PERMISSIONS = {
    "s3": {
        "write": "s3:PutObject",
        "read": "s3:GetObject",
        "list": "s3:ListBucket",
        "list uploads": "s3:ListBucketMultipartUploads",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "write": "storage.objects.create",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
}
"""Names of the permissions to write, read, list and delete, in the words of the store."""


def probe(store: Store) -> bool:
    """Whether the store refuses to write an object that exists, if asked to (a conditional put).

    Raises UserError if it cannot be reached, or which permissions are missing, all at once.
    """
    name = f".probe-{uuid.uuid4().hex}"
    conditional = True

    def write() -> None:
        store.write(name, b"0")

    def read() -> None:
        with suppress(FileNotFoundError):  # it could not be written
            store.read(name)

    requests: dict[str, Callable[[], object]] = {
        "write": write,
        "read": read,
        "list": lambda: store.children(name),
        "list uploads": lambda: store.abort_uploads(name),
        "delete": lambda: store.delete([name]),
    }
    words = _PERMISSIONS.get(store.address.protocol, {})
    missing = []
    for what, request in requests.items():
        try:
            request()
            if what == "write":
                conditional = store.refuses_to_replace(name)
        except UserError as error:
            if not is_denied(error.__cause__):
                raise
            missing.append(words.get(what, what))
    if missing:
        raise UserError(
            f"{store.address}: the credentials lack the permissions {', '.join(missing)}: grant them below this address"
        )
    return conditional
