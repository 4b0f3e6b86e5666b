"""Check Kubernetes manifests and Dockerfiles without a cluster: required fields, and the commands that they start."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

API_VERSIONS = {"PyTorchJob": "kubeflow.org/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
INSTRUCTIONS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
)


def manifest_problems(text: str) -> Iterator[str]:
    """Yield what is wrong with the manifests of a YAML text."""
    for manifest in yaml.safe_load_all(text):
        kind = manifest.get("kind")
        if manifest.get("apiVersion") != API_VERSIONS.get(kind, ""):
            yield f"{kind}: apiVersion must be one of {API_VERSIONS}"
        if not manifest.get("metadata", {}).get("name"):
            yield f"{kind}: has no metadata.name"
        pods = list(_pods(manifest))
        if not pods:
            yield f"{kind}: has no containers"
        for pod in pods:
            yield from _pod_problems(pod)
        if kind == "PyTorchJob":
            # The operator adds the port and the variables of torchrun to the container of this name only.
            names = [container.get("name") for pod in pods for container in pod["containers"]]
            if names != ["pytorch"] * len(pods):
                yield f"the container of a PyTorchJob must be named pytorch, not {names}"
        replicas = manifest.get("spec", {}).get("replicatedJobs", [])
        for job in [each["template"]["spec"] for each in replicas]:
            if job.get("parallelism") != job.get("completions"):
                yield "JobSet: parallelism and completions must both be the number of nodes"


def _pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications of pods: mappings with containers."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _pods(inner)


def _pod_problems(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        yield from (f"a container has no {key}" for key in ("name", "image", "command") if not container.get(key))
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        if mounts != volumes:
            yield f"volumes {sorted(volumes)}, but volumeMounts {sorted(mounts)}"
        words = [*container.get("command", []), *container.get("args", [])]
        yield from (f"{word!r} in a command must be a text" for word in words if not isinstance(word, str))


def manifest_commands(text: str) -> list[list[str]]:
    """The words of the commands of all containers."""
    pods = [pod for manifest in yaml.safe_load_all(text) for pod in _pods(manifest)]
    return [[*each.get("command", []), *each.get("args", [])] for pod in pods for each in pod["containers"]]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its argument) of a Dockerfile, in order."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(name, argument.strip()) for name, _, argument in found]


def dockerfile_problems(text: str) -> Iterator[str]:
    """Yield what is wrong with a Dockerfile."""
    found = instructions(text)
    yield from (f"{name} is no instruction of a Dockerfile" for name, _ in found if name not in INSTRUCTIONS)
    if next((name for name, _ in found if name != "ARG"), "") != "FROM":
        yield "the first instruction must be FROM"
    for name, argument in found:
        if name in ("CMD", "ENTRYPOINT"):
            try:
                json.loads(argument)
            except ValueError:  # a shell would be process 1, which does not pass signals on
                yield f"{name} {argument}: must be a JSON array"


def scripts(text: str) -> list[str]:
    """The shell scripts of a Dockerfile."""
    return [argument for name, argument in instructions(text) if name == "RUN"]
