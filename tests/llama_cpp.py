"""llama.cpp in a process of its own: the token ids that it gives for texts.

`xllamacpp` on PyPI has its library with a server. As a script this file is that process.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "xllamacpp==2026.10.11549"
ANSWER = "answer: "


def install(at: Path) -> Path:
    """Installs llama.cpp into this directory, which it returns."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(at), PACKAGE]
    subprocess.run(command, check=True, timeout=300)
    return at


def token_ids(installed: Path, model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Of each text with the tokens that the model puts around it."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    asked = json.dumps([str(model), list(texts)])
    command = [sys.executable, __file__]
    run = subprocess.run(
        command, input=asked, text=True, capture_output=True, timeout=300, env=environment, check=True
    )
    return json.loads(run.stdout.split(ANSWER)[1])


def main() -> None:
    import xllamacpp  # pyrefly: ignore[missing-import]

    model, texts = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = model, 64, 0
    parameters.warmup = parameters.fit_params = False
    server = xllamacpp.Server(parameters)
    ids = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, headers)
        with urllib.request.urlopen(request) as answer:
            ids.append(json.load(answer)["tokens"])
    print(ANSWER + json.dumps(ids), flush=True)
    os._exit(0)  # the threads of the server never end


if __name__ == "__main__":
    main()
