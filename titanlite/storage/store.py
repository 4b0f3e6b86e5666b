"""Objects in a store, by fsspec: list, read a range, write, create, delete.

Each request has a bound in seconds and is repeated after transient errors. FileNotFoundError and FileExistsError are
answers of the store; any other failure is a UserError that names the address and the remedy.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import MAX_BYTES
from titanlite.runtime.logging import log
from titanlite.runtime.retry import TRANSIENT_STATUSES, TRANSPORT_ERRORS, http_status, is_transient, reason, retrying
from titanlite.storage.address import EXTRAS, Address, is_safe_name, path_below
from titanlite.storage.config import StorageConfig

T = TypeVar("T")

DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before a request is repeated, each times a random factor between 0.5 and 1."""
PART_BYTES = 2**26
"""Size of the parts of a large object that is written; also of the parts of a file that a manifest has hashes of."""
COPIED_BYTES = 2**23
"""Size of the ranges in which a larger object is copied to a disk."""
UPLOADS = 4
"""Parts of one object that are sent at the same time. So many parts are in memory."""
REQUESTS = 16
"""Small requests at the same time."""

_VARIABLE = "TITANLITE_STORAGE"
"""Environment variable with the settings of [storage] as JSON: worker processes inherit it."""


@dataclass(frozen=True)
class Facts:
    """bytes: the size of an object. etag: changes with its content; "" if the store has none."""

    bytes: int
    etag: str = ""


def apply_settings(section: StorageConfig) -> None:
    """Let this process, and the processes that it starts, reach stores as [storage] says."""
    os.environ.pop(_VARIABLE, None)
    if section != StorageConfig():
        os.environ[_VARIABLE] = json.dumps(asdict(section))


def settings() -> StorageConfig:
    """How this process reaches stores."""
    return StorageConfig(**json.loads(os.environ.get(_VARIABLE, "{}")))


class LargeObjectError(UserError):
    """An object that must be small, and is not."""

    def __init__(self, where: str, size: int, max_bytes: int) -> None:
        self.damage = f"has {size:,} bytes, more than {max_bytes:,}"
        super().__init__(f"{where} {self.damage}: titanlite has not written it, and does not read it")


class Store:
    """The objects below `address`. Names are relative to it; "" is the address itself, as of one object."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def list(self, name: str = "") -> dict[str, Facts]:
        """All objects below `name`, at any depth; {} if there are none."""
        place = self._path(name)

        def find() -> dict[str, Facts]:
            found = self._fs.find(place, detail=True, **self._bound())
            return {_relative(path, self.address.path): _facts(info) for path, info in found.items()}

        try:
            found = self._call("list", name, find)
        except FileNotFoundError:
            return {}
        return _safe(self.address, {each: of for each, of in found.items() if each != name and not _is_marker(each)})

    def children(self, name: str = "") -> dict[str, Facts | None]:
        """The objects directly below `name`, and the first parts of the names of deeper ones, with None."""
        place = self._path(name)

        def ls() -> dict[str, Facts | None]:
            return {
                _relative(info["name"], place).removesuffix("/"): None if info["type"] == "directory" else _facts(info)
                for info in self._fs.ls(place, detail=True, **self._bound())
                if _relative(info["name"], place)
            }

        try:
            return _safe(self.address / name if name else self.address, self._call("list", name, ls))
        except FileNotFoundError:
            return {}

    def facts(self, name: str = "") -> Facts:
        """Raises FileNotFoundError."""
        place = self._path(name)

        def info() -> Facts:
            found = self._fs.info(place, **self._bound())
            if found["type"] == "directory":
                raise FileNotFoundError
            return _facts(found)

        try:
            return self._call("read", name, info)
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, PermissionError) or (isinstance(cause, OSError) and cause.errno == errno.EINVAL):
                self.read_range(name, 0, 1)  # raises the reason, which an answer to HEAD lacks
            raise

    def exists(self, name: str = "") -> bool:
        try:
            self.facts(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str = "", max_bytes: int = MAX_BYTES) -> bytes:
        """The content of a small object. Raises FileNotFoundError, and LargeObjectError before a larger one is read."""
        return self._whole(name, self._require_small(name, max_bytes))

    def _whole(self, name: str, size: int) -> bytes:
        return self._call("read", name, lambda: bytes(self._fs.cat_file(self._path(name), **self._bound(size))))

    def _require_small(self, name: str, max_bytes: int) -> int:
        size = self.facts(name).bytes
        if size > max_bytes:
            raise LargeObjectError(str(self.address / name if name else self.address), size, max_bytes)
        return size

    def copy_to(self, folder: Path, name: str, max_bytes: int = MAX_BYTES) -> Path:
        """Copy an object into `folder`, where it keeps its name; returns its path. Raises as read, UserError if the
        name leads out of the folder, and OSError of the file system."""
        path = path_below(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if (size := self._require_small(name, max_bytes)) <= COPIED_BYTES:
            path.write_bytes(self._whole(name, size))
            return path
        with path.open("xb") as file:
            for start in range(0, size, COPIED_BYTES):
                file.write(self.read_range(name, start, min(COPIED_BYTES, size - start)))
        return path

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start` on, fewer only where the object ends. Raises FileNotFoundError."""
        if length == 0:
            return b""

        def cat() -> bytes:
            try:
                place, end = self._path(name), start + length
                return bytes(self._fs.cat_file(place, start=start, end=end, **self._bound(length)))
            except Exception as error:
                if _status(error) == 416:  # it ends before `start`
                    return b""
                raise

        return self._call("read", name, cat)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it."""
        place = self._path(name)
        self._call("write", name, lambda: self._fs.pipe_file(place, content, **self._bound(len(content))))

    def create(self, name: str, content: bytes) -> None:
        """Write a small object unless one of this name exists: then raises FileExistsError, unless it has this content,
        as after an earlier attempt whose answer was lost. Of several processes, at most one succeeds, unless the store
        has no conditional put (see `refuses_to_replace`)."""
        place = self._path(name)

        def put() -> bool:
            try:
                if self._put_if_absent(name, content):
                    return True
            except NotImplementedError:
                if not self._fs.exists(place, **self._bound()):
                    self._fs.pipe_file(place, content, **self._bound(len(content)))
                    return True
            try:
                has_size = self._fs.info(place, **self._bound())["size"] == len(content)
                return has_size and bytes(self._fs.cat_file(place, **self._bound(len(content)))) == content
            except FileNotFoundError:  # a conflict with a deletion
                raise ConnectionAbortedError("another request wrote the object at the same time") from None

        if not self._call("write", name, put):
            raise FileExistsError(None, "exists already", str(self.address / name))

    def refuses_to_replace(self, name: str) -> bool:
        """Whether the store itself refuses to create the object `name`, which exists: whether it has conditional puts.
        Otherwise the object may be replaced."""
        with suppress(NotImplementedError):
            return not self._call("write", name, lambda: self._put_if_absent(name, b""))
        return False

    def _put_if_absent(self, name: str, content: bytes) -> bool:
        """One conditional put; False if the object exists. Raises NotImplementedError if the store has none."""
        try:
            self._fs.pipe_file(self._path(name), content, mode="create", **self._bound(len(content)))
        except Exception as error:
            if isinstance(error, FileExistsError) or _status(error) in (409, 412):
                return False
            if _status(error) == 501:
                raise NotImplementedError from error
            raise
        return True

    @contextmanager
    def writer(self, name: str) -> Iterator["Upload"]:
        """Write an object of any size, in parts, while its content is made. It appears at the end of the block, and
        not at all after an exception."""
        upload = _MultipartUpload(self, name) if self.address.protocol == "s3" else Upload(self, name)
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.discard()
            raise

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""
        in_parallel(self._delete, names)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("delete", name, lambda: self._fs.rm_file(self._path(name), **self._bound()))

    def abort_uploads(self, name: str = "") -> int:
        """Remove the parts of unfinished uploads of objects below `name`, which cost space; returns their number.
        Other stores than s3:// remove them by themselves."""
        if self.address.protocol != "s3":
            return 0
        prefix = f"{self._path(name)}/".partition("/")[2]
        removed, listed = 0, {"IsTruncated": True}
        while listed.get("IsTruncated"):
            listed = self._s3("list", name, "list_multipart_uploads", Prefix=prefix)
            for each in listed.get("Uploads", []):
                self._abort(name, each["Key"], each["UploadId"])
                removed += 1
        return removed

    def _abort(self, name: str, key: str, upload: str) -> None:
        with suppress(FileNotFoundError):
            self._s3("delete", name, "abort_multipart_upload", Key=key, UploadId=upload)

    def _s3(self, verb: str, name: str, method: str, **arguments: Any) -> Any:
        bound = self._bound(len(arguments.get("Body", b"")))
        return self._call(
            verb, name, lambda: self._fs.call_s3(method, Bucket=self.address.bucket, **arguments, **bound)
        )

    @property
    def _fs(self) -> Any:
        return _file_system(self.address.protocol, settings(), os.getpid())

    def _path(self, name: str) -> str:
        return f"{self.address.path}/{name}".rstrip("/")

    def _bound(self, num_bytes: int = 0) -> dict[str, float]:
        """The bound of one request in seconds, at 1 MiB/s."""
        return {"timeout": settings().timeout_s + num_bytes / 2**20} if self._fs.async_impl else {}

    def _call(self, verb: str, name: str, request: Callable[[], T]) -> T:
        where = str(self.address / name) if name else str(self.address)
        try:
            return retrying(where, request, DELAYS_S, verb=verb, transient=_is_transient, jitter=0.5)
        except FileNotFoundError as error:
            if _lacks_bucket(error):
                raise UserError(
                    f"cannot {verb} {where}: the bucket {self.address.bucket} does not exist: create it, or fix the "
                    "address, storage.endpoint or storage.region"
                ) from error
            raise FileNotFoundError(None, "does not exist", where) from None
        except (FileExistsError, NotImplementedError, UserError):
            raise
        except Exception as error:
            raise UserError(f"cannot {verb} {where}: {_explained(error)}") from error


class Upload:
    """An object that is being written: in one request at the end."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        """data: any buffer of bytes."""
        self._buffer += data
        return len(data)

    def finish(self) -> None:
        self._store.write(self._name, bytes(self._buffer))

    def discard(self) -> None:
        self._buffer.clear()


class _MultipartUpload(Upload):
    """Sends parts in threads while the next ones are written."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        self._key = store._path(name).partition("/")[2]
        self._id = ""
        self._threads = ThreadPoolExecutor(UPLOADS)
        self._parts: list[Future[dict[str, Any]]] = []
        self._sent = 0

    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as rest:
            size = len(rest)
            while len(rest):
                content = rest[: PART_BYTES - len(self._buffer)]
                self._buffer += content
                if len(self._buffer) == PART_BYTES:
                    self._send(bytes(self._buffer))
                    self._buffer = bytearray()
                rest = rest[len(content) :]
            return size

    def _send(self, content: bytes) -> None:
        if not self._id:
            self._id = self._store._s3("write", self._name, "create_multipart_upload", Key=self._key)["UploadId"]
        if len(self._parts) >= UPLOADS:
            self._parts[-UPLOADS].result()
        self._parts.append(self._threads.submit(self._send_part, len(self._parts) + 1, content))
        self._sent += len(content)

    def _send_part(self, number: int, content: bytes) -> dict[str, Any]:
        which = {"Key": self._key, "UploadId": self._id, "PartNumber": number}
        sent = self._store._s3("write", self._name, "upload_part", **which, Body=content)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    def finish(self) -> None:
        if not self._id:
            super().finish()
        else:
            if self._buffer:
                self._send(bytes(self._buffer))
            parts = {"Parts": [part.result() for part in self._parts]}
            which = {"Key": self._key, "UploadId": self._id, "MultipartUpload": parts}
            try:
                self._store._s3("write", self._name, "complete_multipart_upload", **which)
            except FileNotFoundError:  # no such upload: complete, if the answer to an earlier attempt was lost
                if self._store.facts(self._name).bytes != self._sent:
                    raise
        self._threads.shutdown()

    def discard(self) -> None:
        super().discard()
        self._threads.shutdown(cancel_futures=True)
        if self._id:
            with suppress(UserError):  # the error that led here counts; a later start removes the parts
                self._store._abort(self._name, self._key, self._id)


def in_parallel(function: Callable[[Any], T], arguments: Iterable[Any]) -> list[T]:
    """The results for each of `arguments`, in order, of REQUESTS threads."""
    arguments = list(arguments)
    if len(arguments) < 2:
        return [function(each) for each in arguments]
    with ThreadPoolExecutor(min(REQUESTS, len(arguments))) as threads:
        return list(threads.map(function, arguments))


@lru_cache
def _file_system(protocol: str, settings: StorageConfig, process: int) -> Any:  # noqa: ARG001
    """fsspec's file system of this process: a fork must not use that of its parent."""
    import fsspec

    options: dict[str, Any] = {}
    if protocol == "s3":
        connection = {"region_name": settings.region, "verify": settings.ca_file}
        options = {
            "endpoint_url": settings.endpoint or None,
            "profile": settings.profile or None,
            "anon": settings.anonymous,
            "client_kwargs": {key: value for key, value in connection.items() if value},
            "config_kwargs": {
                "connect_timeout": min(settings.timeout_s, 20),
                "read_timeout": settings.timeout_s,
                "retries": {"total_max_attempts": 1},
            },
        }
    elif protocol == "gs":
        options = {"endpoint_url": settings.endpoint or None, "token": "anon" if settings.anonymous else None}
    elif protocol == "az" and settings.anonymous:
        options = {"anon": True}
    try:
        found = fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        raise UserError(
            f"{protocol}:// needs a package that is not installed ({error}): pip install "
            f"'titanlite[{EXTRAS[protocol]}]'"
        ) from None
    if protocol == "s3":
        found.retries = 1  # requests are repeated here, for all protocols alike
    return found


def _safe(address: Address, found: dict[str, T]) -> dict[str, T]:
    """Objects by their names below `address`, without names that are no path below a folder, such as "../x"; logs it"""
    safe = {name: value for name, value in found.items() if is_safe_name(name)}
    if left_out := sorted(found.keys() - safe.keys()):
        _warn_of_names(address, left_out[0], len(left_out))
    return safe


@lru_cache
def _warn_of_names(address: Address, first: str, count: int) -> None:
    """Log the warning once: folders are listed again and again."""
    others = f" and {count - 1:,} more" if count > 1 else ""
    log.warning(
        '%s: left out the object %r%s: a name with an empty part, ".", "..", a backslash or a control character is not '
        "read",
        *(address, first, others),
    )


def _facts(info: dict[str, Any]) -> Facts:
    created = info.get("created", "")
    etag = info.get("ETag") or info.get("etag") or (created.timestamp() if isinstance(created, datetime) else created)
    return Facts(int(info["size"]), str(etag).strip('"'))


def _relative(path: str, base: str) -> str:
    """The name of the object at `path`, relative to `base`; "" for `base` itself, also with "/" at its end."""
    path = path.removeprefix("/") if path.startswith(f"/{base}") else path  # of memory://
    return path.removeprefix(base).removeprefix("/")


def _is_marker(name: str) -> bool:
    """Whether an object stands for a folder: programs write empty ones, with "/" at the end."""
    return name.endswith("/") and is_safe_name(name.removesuffix("/"))


def _status(error: BaseException) -> int | None:
    """The HTTP status of a store's answer; None if the request failed otherwise."""
    found = http_status(error)
    cause: BaseException | None = error
    while found is None and cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        found = found or getattr(cause, "status_code", None) or getattr(cause, "code", None)
        found = found if isinstance(found, int) else None
        cause = cause.__cause__
    return found


def _lacks_bucket(error: BaseException) -> bool:
    """Whether a store has said that the bucket, and not the object, does not exist."""
    each: BaseException | None = error
    while each is not None:
        if "NoSuchBucket" in str(each) or "bucket does not exist" in str(each):
            return True
        each = each.__cause__ or each.__context__
    return False


_CONNECTION_ERRORS = {
    *("ConnectionError", "HTTPClientError", "IncompleteRead", "ResponseParserError"),  # of botocore
    "FlexibleChecksumError",  # of botocore: the content is not what S3 has a checksum of
    *("ServiceRequestError", "ServiceResponseError", "HttpError"),  # of Azure's and Google's clients
}
"""Names of the base classes of connection errors in the clients of stores, beside those of runtime.retry."""


def _is_transient(error: BaseException) -> bool:
    kinds = {base.__name__ for base in type(error).__mro__}
    if kinds & TRANSPORT_ERRORS:  # no answer, or half of one; the cause has a code of its own
        return True
    status = _status(error)
    if status is not None:
        return status in TRANSIENT_STATUSES or status == 409  # another operation on the object at the same time
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    return is_transient(error) or bool(_CONNECTION_ERRORS & kinds)


def _code(error: BaseException | None) -> str:
    """The code of S3's answer, such as AccessDenied; "" if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


_REMEDIES = {
    "ExpiredToken": "the credentials have expired: renew them and restart",
    "RequestTimeTooSkewed": "the clock of this host differs from that of the store: set it, as by NTP",
    "InvalidAccessKeyId": "the store does not know this access key: fix it, storage.profile or storage.endpoint",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: fix it, or storage.region",
}
"""Code of S3's answer -> remedy."""


def is_denied(error: BaseException | None) -> bool:
    """Whether a store has answered that the credentials, which it knows, do not permit the request."""
    denied = isinstance(error, PermissionError) or (error is not None and _status(error) in (401, 403))
    return denied and _code(error) not in _REMEDIES


def _explained(error: BaseException) -> str:
    """The reason of a failure, and the remedy."""
    text = reason(error)
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
        remedy = "give them in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by storage.profile"
    elif (code := _code(error)) in _REMEDIES:
        remedy = _REMEDIES[code]
    elif "expired" in text.lower():
        remedy = _REMEDIES["ExpiredToken"]
    elif is_denied(error):
        remedy = "check that the credentials are valid and may list, read, write and delete objects there"
    else:
        remedy = "check the address and [storage]"
    return f"{text}; {remedy}"
