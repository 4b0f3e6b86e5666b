"""Put a workplace's run into a bucket, with keys that a client of files would not write."""

import uuid

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
    for key, content in {**contents, **place.objects}.items():
        client.put_object(Bucket=bucket, Key=f"run/{key}", Body=content)
    place.run, place.own = f"s3://{bucket}/run", server
