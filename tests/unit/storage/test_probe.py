"""The probe names what a store does not permit."""

import pytest

from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address
from titanlite.storage.probe import probe
from titanlite.storage.store import Store

pytestmark = pytest.mark.slow


def denied(methods: str, path: str = "") -> Fault:
    return Fault("refuse", methods, path, status=403, code="AccessDenied")


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], True),
        ([Fault("ignore condition", "PUT", conditional=True)], False),
        ([Fault("refuse", "PUT", conditional=True, status=501, code="NotImplemented")], False),
        ([Fault("refuse", "PUT", times=2)], True),
        ([denied("PUT")], "the credentials lack the permissions s3:PutObject: grant them"),
        ([denied("DELETE POST")], "lack the permissions s3:DeleteObject"),
        (
            [denied("GET HEAD", "^[^?]*run/.probe"), denied("PUT")],
            "lack the permissions s3:PutObject, s3:GetObject: grant",
        ),
        ([denied("GET", "list-type")], "lack the permissions s3:ListBucket:"),
        ([denied("GET", "[?&]uploads")], "lack the permissions s3:ListBucketMultipartUploads:"),
        ([Fault("refuse", status=400, code="ExpiredToken")], "the credentials have expired: renew them and restart"),
        ([Fault("refuse", status=403, code="RequestTimeTooSkewed")], "the clock of this host differs from that of"),
        ([Fault("refuse", status=403, code="InvalidAccessKeyId")], "the store does not know this access key"),
        ([Fault("refuse", status=404, code="NoSuchBucket")], "the bucket .* does not exist: create it"),
    ],
)
def test_faults(faulty_store: tuple[Bucket, Proxy], faults: list[Fault], expected: bool | str) -> None:
    bucket, proxy = faulty_store
    folder = Store(Address.parse(f"{bucket.address}/run"))
    proxy.faults[:] = faults
    if isinstance(expected, bool):
        assert probe(folder) is expected
    else:
        with pytest.raises(UserError, match=expected):
            probe(folder)
    proxy.clear()
    assert expected is not True or bucket.keys() == []


def test_no_credentials(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="give them in the environment, as AWS_ACCESS_KEY_ID"):
        probe(Store(Address.parse(f"{store.address}/run")))
