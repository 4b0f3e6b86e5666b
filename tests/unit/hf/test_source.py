"""initial_load_path: folders, and models from a local server that behaves like the hub."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants

from tests.unit.data.small_hub import COMMIT, SmallHub, small_hub
from tests.unit.hf.making import tiny, write_model
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.preflight import check_start, imported_from
from titanlite.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES
from titanlite.hf import hub as hub_module
from titanlite.hf import source as source_module
from titanlite.hf.folder import ModelFolder
from titanlite.hf.hub import HubModel, download, open_snapshot, parse_hub_name, pinned
from titanlite.hf.source import check_source, fetch_source, open_source
from titanlite.models.registry import FAMILIES
from titanlite.ranks.distributed import World
from titanlite.runtime import retry
from titanlite.runtime.errors import ConfigError, LateRanksError, Problem, UserError

LLAMA3 = FAMILIES["llama3"]
MOVED = "d1" * 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name-1.5_b@v1.0", HubModel("org/name-1.5_b", "v1.0")),
        (f"org/name@{COMMIT}", HubModel("org/name", COMMIT)),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        *((text, None) for text in ("name", "a/b/c", "../name", "/org/name", "./name", "org/", "org/name@", "a b/c")),
        *((text, None) for text in ("org/..", "org/name\n", "", "~/name", "org/näme", "-", "org/.hidden")),
    ],
)
def test_names_on_the_hub(text: str, expected: HubModel | None) -> None:
    assert parse_hub_name(text) == expected


def test_the_configuration_check_reports_problems_of_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "it")
    text, config = f"hf:{tmp_path / 'it'}", tiny(LLAMA3)
    assert check_source(text, LLAMA3, config) == []
    assert check_source(text, LLAMA3, replace(config, max_seq_len=8)) == []
    found = check_source(text, LLAMA3, replace(config, vocab_size=140, rope_theta=1e4, tie_embeddings=True))
    assert [(problem.key, problem.value) for problem in found] == [
        *(("model.vocab_size", 140), ("model.rope_theta", 1e4), ("model.tie_embeddings", True))
    ]
    assert found[0].rule == f"that of config.json in {text}, 131"
    assert found[0].remedy.startswith("write vocab_size = 131 in [model], and use the folder's tokenizer")
    assert found[1].remedy == (
        'write rope_theta = 500000.0 in [model]; to extend the context: checkpoint.accept_changes = ["rope"]'
    )
    longer = replace(config, vocab_size=140, rope_theta=1e4)
    assert [problem.key for problem in check_source(text, LLAMA3, longer, accepts_rope=True)] == ["model.vocab_size"]
    assert found[2].remedy == "write tie_embeddings = false in [model]"
    (problem,) = check_source(text, replace(LLAMA3, name="other"), config)
    assert (problem.key, problem.remedy) == ("model.family", 'write family = "llama3" in [model]')
    (tmp_path / "it" / "stale.safetensors").touch()
    (problem,) = check_source(text, LLAMA3, config)
    assert problem.key == "checkpoint.initial_load_path"
    assert "unexpected file stale.safetensors" in problem.remedy


def test_a_path_without_folder_is_a_hub_name_or_a_problem(tmp_path: Path) -> None:
    def check(text: str) -> list[Problem]:
        return check_source(text, LLAMA3, tiny(LLAMA3))

    assert check("hf:org/name@v1") == []
    (problem,) = check(f"hf:{tmp_path / 'nowhere'}")
    assert f"there is no folder {tmp_path / 'nowhere'}: fix the path" in problem.remedy
    for text in ("hf:", "hf:name"):
        (problem,) = check(text)
        assert "there is no folder" in problem.remedy


def test_only_weights_are_imported_and_only_by_a_new_run(tmp_path: Path) -> None:
    section = CheckpointConfig(enable=True, initial_load_path="hf:org/name")
    assert check_start(section, str(tmp_path)) == []
    (problem,) = check_start(replace(section, initial_load_model_only=False), str(tmp_path))
    assert (problem.key, problem.remedy) == ("checkpoint.initial_load_model_only", "leave it out")
    assert imported_from(section, str(tmp_path)) == "hf:org/name"
    assert imported_from(replace(section, initial_load_path="org/name"), str(tmp_path)) == ""
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    assert imported_from(section, str(tmp_path)) == ""
    assert imported_from(replace(section, enable=False), str(tmp_path)) == "hf:org/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry.retrying, "__defaults__", ((0.01, 0.01), retry.time.sleep))
    monkeypatch.setattr(source_module, "_POLL_S", 0.01)
    with small_hub(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def requested_files(hub: SmallHub) -> list[str]:
    paths = [path for method, path, _ in hub.requests if method == "GET" and "resolve" in path]
    return sorted({path.rpartition("/")[2] for path in paths})


def test_a_model_is_downloaded_once_and_only_what_is_needed(hub: SmallHub, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "org" / "name"
    written = write_model(folder, shards=2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "code.py"):
        (folder / name).write_bytes(b"0" * 1000)
    (folder / TEMPLATES).mkdir()
    tokenizer_files = [*TOKENIZER_FILES, f"{TEMPLATES}/tools.jinja"]
    for name in tokenizer_files:
        (folder / name).write_text(name)
    found = open_source("org/name")
    assert all((found.path / name).is_file() for name in tokenizer_files)
    names = found.family.hugging_face.names(found.hyper_parameters)
    own = {name: torch.empty_like(written[names[name]]) for name in names}
    found.fill_(own)
    assert all(torch.equal(tensor, written[names[name]]) for name, tensor in own.items())
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    expected = ["config.json", *shards, "model.safetensors.index.json", *(Path(name).name for name in tokenizer_files)]
    assert requested_files(hub) == sorted(expected)
    assert all(tensor.file.parent.name == "blobs" for tensor in found.tensors.values())
    assert pinned(HubModel("org/name")) == HubModel("org/name", COMMIT)
    hub.requests.clear()
    model = HubModel("org/name", COMMIT)
    assert open_snapshot(model, download(model)).name == f"hf:org/name@{COMMIT}"
    assert requested_files(hub) == []
    hub.commit = MOVED
    assert pinned(HubModel("org/name")).revision == MOVED


def test_an_index_cannot_redirect_the_download(hub: SmallHub, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "org" / "name"
    write_model(folder, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "../../model-00001-of"))
    with pytest.raises(UserError, match=r"hf:org/name: .*is in '../../model-00001-of-00002.safetensors', which is not"):
        open_source("org/name")
    assert requested_files(hub) == ["config.json", index.name]


def test_links_of_a_snapshot_stay_in_its_own_cache_folder(hub: SmallHub, tmp_path: Path) -> None:
    assert hub.endpoint
    for name in ("name", "other"):
        write_model(tmp_path / "hub" / "org" / name)
    open_source("org/other")
    model = HubModel("org/name", COMMIT)
    path = download(model)
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(tmp_path / "cache" / "models--org--other" / "snapshots" / COMMIT / "config.json")
    with pytest.raises(UserError, match=r"config.json is a link that leaves the folder"):
        open_snapshot(model, path)


def test_missing_models_and_an_unreachable_hub(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"hf:org/name is not a local folder, and cannot be downloaded .*HF_TOKEN"):
        open_source("org/name")
    write_model(tmp_path / "hub" / "org" / "name")
    hub.failures = 1
    assert open_source("org/name").tensors  # after a retry
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be downloaded from the hub|cannot read"):
        open_source("org/another")
    assert open_source("org/name").tensors  # cached models need no hub


def on_all_ranks(
    text: str, worlds: list[World], timeout_s: int = 60, absent: int = -1, **changes: int
) -> list[ModelFolder | str | None]:
    """The result of fetch_source, or its error message, on ranks that are threads of this process.

    absent: a rank that does not call it.
    """
    store = dist.HashStore()
    found: list[ModelFolder | str | None] = [""] * len(worlds)

    def fetch(world: World) -> None:
        try:
            found[world.rank] = fetch_source(text, LLAMA3, tiny(LLAMA3, **changes), world, store, timeout_s)
        except (UserError, ConfigError, LateRanksError) as error:
            found[world.rank] = str(error)

    threads = [threading.Thread(target=fetch, args=(world,), daemon=True) for world in worlds if world.rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_the_first_rank_of_each_node_downloads(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hub" / "org" / "name")
    worlds = [World(rank, rank % 2, 4, "cpu") for rank in range(4)]
    downloads: list[str] = []
    snapshot = hub_module._snapshot

    def counted(model: HubModel, names: list[str], *patterns: str) -> Path:
        downloads.append(f"{model} {'all' if len(names) > 1 else names[0]}")
        return snapshot(model, names, *patterns)

    monkeypatch.setattr(hub_module, "_snapshot", counted)
    found = on_all_ranks("hf:org/name", worlds)
    assert [folder.name for folder in found if isinstance(folder, ModelFolder)] == [f"hf:org/name@{COMMIT}"] * 4
    each = [f"org/name@{COMMIT} {what}" for what in ("all", "model.safetensors")]
    assert sorted(downloads) == sorted(["org/name config.json", *each, *each])
    assert hub.requests

    assert on_all_ranks("", worlds) == [None] * 4
    refused = on_all_ranks("hf:org/name", worlds, vocab_size=140)
    assert all("write vocab_size = 131 in [model]" in str(text) for text in refused)
    missing = on_all_ranks("hf:org/missing", worlds)
    assert len(set(missing)) == 1
    assert "checkpoint.initial_load_path: hf:org/missing is not a local folder" in str(missing[0])


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_wait_of_the_others_and_a_long_download_does_not(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "hub" / "org" / "name")
    write_model(tmp_path / "local")
    worlds = [World(rank, rank % 2, 4, "cpu", 2) for rank in range(4)]
    late = "no message within 1 s from rank {}".format
    assert on_all_ranks("hf:org/name", worlds, 1, absent=0)[1:] == [late(0)] * 3
    assert on_all_ranks("hf:org/name", worlds, 1, absent=2)[:2] == [late("2 and 1 more")] * 2
    assert on_all_ranks("hf:org/name", worlds, 1, absent=3)[:3] == [late(3)] * 3
    # No rank waits for one that only has to open a folder: the next comparison names it.
    folders = on_all_ranks(f"hf:{tmp_path / 'local'}", worlds, 1, absent=3)[:3]
    assert all(isinstance(folder, ModelFolder) for folder in folders)

    def slow(model: HubModel) -> Path:
        time.sleep(2)
        return download(model)

    asked, check = list[int](), dist.Store.check

    def counted(store: dist.Store, keys: list[str]) -> bool:
        asked.append(len(keys))
        return check(store, keys)

    monkeypatch.setattr(dist.PrefixStore, "check", counted)
    monkeypatch.setattr(source_module, "download", slow)
    assert all(isinstance(folder, ModelFolder) for folder in on_all_ranks("hf:org/name", worlds, 1))
    assert set(asked) == {1}  # with a key per rank, all ranks would ask for their square
    assert hub.requests
