"""Put a workplace's run into a bucket, with keys that a client of files would not write."""

import uuid
from http.client import HTTPConnection
from urllib.parse import quote, urlsplit

from tests.security.workplace import Workplace


def upload(place: Workplace, server: str) -> None:
    """Upload the run and the further objects; commands then open the address."""
    import boto3

    bucket = f"test-{uuid.uuid4().hex}"
    client = boto3.client(
        "s3", endpoint_url=server, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.create_bucket(Bucket=bucket)
    files = [path for path in (place.here / "run").rglob("*") if path.is_file()]
    contents = {str(path.relative_to(place.here / "run")): path.read_bytes() for path in files}
    connection = HTTPConnection(urlsplit(server).netloc)  # a client of S3 resolves the .. of a key
    who = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    for key, content in {**contents, **place.objects}.items():
        connection.request("PUT", f"/{bucket}/run/{quote(key)}", content, {"Authorization": who})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, (key, answer.status)
    connection.close()
    place.run, place.own = f"s3://{bucket}/run", server
