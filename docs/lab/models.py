"""Which causal language models of transformers Baton serves, and by what; the page of verdicts.

Walks the registry of transformers and the classes of its models. A class that Baton has no class for is made
small, with the widths of the check at a start and random weights. Its tokens in a whole cluster of one
prefill and one decode worker must be those of transformers, in float32, also after the engine of the decode
worker is killed.

    python -m docs.lab.models [--cluster] [--only NAME] [--page docs/lab/models.md]
"""

import argparse
import asyncio
import json
import logging
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import greedy_tokens
from baton.engine import EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.engine.execution.module_check import check_modules, reduced_settings
from baton.engine.loader.families import FAMILIES
from baton.engine.loader.modules import modules_config
from baton.engine.models.transformers.interface import ERRORS, words_of
from baton.engine.models.transformers.modules import modules_class, text_of, with_values

LENGTHS = (1, 2, 17, 48, 90, 150, 333, 500)
"""Of prompts."""
TOKENS = 12
"""Of each answer."""
NEAR = 1e-3
"""Two tokens whose logits differ by less, by the largest logit, may change places by rounding."""
OTHER = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)
QWEN = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
GLM = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **{
        f"Qwen{kind}ForConditionalGeneration": {"text_config": {"rope_parameters": QWEN}}
        for kind in ("2VL", "2_5_VL", "2_5OmniThinker")
    },
    **{
        f"Glm{kind}ForConditionalGeneration": {"text_config": {"rope_parameters": GLM}}
        for kind in ("4v", "46V")
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128, "num_experts": 8},
    "MinistralForCausalLM": {"head_dim": 128, "num_key_value_heads": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "CTRLLMHeadModel": {"n_positions": 1024},
    "OPTForCausalLM": {"word_embed_proj_dim": 64},
    "WhisperForCausalLM": {"max_target_positions": 1024},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "rope_parameters": GLM}},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        "text_config": {"head_dim": 128, "rope_parameters": QWEN | {"mrope_section": [24, 20, 20]}}
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "Dots1ForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "Lfm3ForCausalLM": {},
}
"""Settings without which transformers' defaults make no model."""
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--advanced.num-threads", "1", "--advanced.num-blocks", "400",
    "--max-num-batched-tokens", "64", "--drain-timeout", "1", "--failure-timeout", "60",
    "--max-model-len", "640",
)  # fmt: skip


PAGE = """# Models of transformers

`make models` writes this page. It walks the registry of transformers and its model classes.

With transformers {version}, {own} classes have a class of Baton, the modules of transformers compute
{modules} with Baton's attention, and {refused} are refused.

- *own*: a class of Baton computes the model.
- *modules*: the modules of transformers compute it; of a model that sees images, its text, and for
  Qwen2-VL and Qwen2.5-VL the images, too. A small random model in float32 was compared with
  transformers: the greedy tokens after {prompts} prompts of 1 to {longest} tokens, in chunks of 64.
  *engine*: by one engine. *1P1D*: by a cluster of one prefill and one decode worker, of classes of
  text alone. *killed*: while the engine of its decode worker was killed.
- *refused*: why, with the default settings of the class. `python -m docs.lab.models --only CLASS`
  prints the reason in full.

| computed by | compared, or why not | classes |
|---|---|---|
{rows}
"""


REASONS = {
    "it has layers of type": "layers of a kind that Baton lacks",
    "its masks are": "masks that are neither causal nor windows nor chunks",
    "makes its own mask": "masks that are neither causal nor windows nor chunks",
    "calls attention with": "attention with arguments that Baton lacks",
    "it never calls": "it never calls transformers' attention interface",
    "no text model": "no model of text alone",
    "no causal language model": "no model of text alone",
    "differs by": "it computes otherwise with Baton's attention",
}
"""What the page says of a refused class, by words of the reason. Other reasons are errors of its modules,
which want an image, an encoder or other settings."""


@dataclass(frozen=True)
class Verdict:
    by: str
    """own, modules or refused."""
    why: str = ""
    tokens: str = ""
    """What was compared with transformers."""


def architectures() -> dict[str, str]:
    """The type of each model that generates text, by the name of its class."""
    found = dict[str, str]()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in OTHER.findall(path.read_text()):
            found.setdefault(name, path.parent.name)
    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for kind, names in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *seeing.items()]:
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, kind)
    return dict(sorted((name, kind) for name, kind in found.items() if kind != "auto"))


def settings_of(name: str, kind: str) -> dict[str, Any]:
    """Those of a model with transformers' defaults. Raises any of `ERRORS`."""
    config = modules_class(name, kind).config_class(**DEFAULTS.get(name, {}))
    return config.to_dict() | {"architectures": [name]}


def verdict(name: str, kind: str) -> Verdict:
    if name in FAMILIES:
        return Verdict("own")
    try:
        config = modules_config(settings_of(name, kind), (), "")
        check_modules(config, "")
    except ERRORS as error:
        text = words_of(error).removeprefix(": ")
        for end in (
            "; vLLM serves it",
            "; nor does the",
            "; vLLM may",
            "; --advanced.model-impl",
            "; --advanced",
        ):
            text = text.partition(end)[0]
        return Verdict(
            "refused", re.sub(r".*(modules of transformers|what its modules compute|attention): ", "", text)
        )
    return Verdict("modules")


def write_small(name: str, kind: str, directory: Path) -> Any:
    """Writes a small checkpoint with random weights. Returns transformers' own model of it."""
    config = modules_config(settings_of(name, kind), (), name)
    settings = next(each for each in reduced_settings(config) if _is_possible(each, name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = with_values(json.dumps(settings))
    model.save_pretrained(directory)
    words = {f"w{i}": i for i in range(text_of(settings)["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyrefly: ignore[read-only]
    tokenizer.decoder = ByteLevel()  # pyrefly: ignore[read-only]
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def _is_possible(settings: Mapping[str, Any], name: str) -> bool:
    try:
        return modules_config(settings, (), name).modules is not None
    except ValueError:
        return False


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def differences(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[str]:
    """Tokens that are not those of transformers."""
    for prompt, tokens in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[
            0, len(prompt) - 1 :
        ]
        best = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if len(tokens) != TOKENS or float(best.max()) > NEAR * float(logits.abs().max()):
            yield f"of a prompt of {len(prompt)} tokens"


def by_engine(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = build_engine(
        EngineConfig(
            str(directory), dtype="float32", num_blocks=400, max_num_batched_tokens=64, max_model_len=640,
            num_threads=1, model_impl="transformers", skip_model_check=True,  # a larger one has passed it
        )
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    answers: dict[bytes, list[int]] = {}
    for number, prompt in enumerate(prompts):
        answers[number.to_bytes(16)] = []
        engine.add(EngineRequest(number.to_bytes(16), prompt, [], greedy))
    while engine.loop.has_work:
        for output in engine.loop.step().outputs:
            answers[output.id].append(output.token)
    return [*answers.values()]


async def by_cluster(directory: Path, prompts: list[list[int]]) -> list[list[list[int]]]:
    """The answers of a cluster, and once more while the engine of its decode worker is killed."""
    named = [
        "--model",
        str(directory),
        "--served-model-name",
        "small",
        "--advanced.model-impl",
        "transformers",
    ]
    named.append("--advanced.skip-model-check")
    with tempfile.TemporaryDirectory() as place:
        flags = ["--advanced.no-overflow", *named[:4]]
        with LocalCluster(
            Path(place), prefill=1, decode=1, worker_flags=[*FLAGS, *named], router_flags=flags
        ) as cluster:
            first = await greedy_tokens(cluster.url, prompts, TOKENS)
            again = asyncio.create_task(greedy_tokens(cluster.url, prompts, TOKENS))
            decode = cluster.of("decode")[0]
            await asyncio.to_thread(decode.kill, "engine")
            second = await again
            if leaks := await asyncio.to_thread(leaks_when_idle, cluster.url):
                raise RuntimeError(f"left when idle: {leaks}")
    return [first, second]


def compared(name: str, kind: str, *, cluster: bool) -> str:
    """Compares a small model's tokens with transformers'. Returns what was right, or the first difference."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        model = write_small(name, kind, directory)
        prompts = prompts_of(model.config.get_text_config().vocab_size)
        runs = {"engine": by_engine(directory, prompts)}
        if cluster and model.config.get_text_config() is model.config:  # others have the same text models
            runs["1P1D"], runs["killed"] = asyncio.run(by_cluster(directory, prompts))
        for where, answers in runs.items():
            for difference in differences(model, prompts, answers):
                return f"WRONG in {where}: {difference}"
        return " · ".join(runs)


def in_short(why: str) -> str:
    """The reason of a refusal as the page has it."""
    found = (text for words, text in REASONS.items() if words in why)
    return why and next(found, "an error of its modules")


def page_of(verdicts: Mapping[str, Verdict]) -> str:
    counts = Counter(each.by for each in verdicts.values())
    groups: dict[tuple[str, str], list[str]] = {}
    for name, each in verdicts.items():
        groups.setdefault((each.by, each.tokens or in_short(each.why)), []).append(name)
    rows = (f"| {by} | {why} | {', '.join(names)} |" for (by, why), names in sorted(groups.items()))
    return PAGE.format(
        version=transformers.__version__,
        own=counts["own"],
        modules=counts["modules"],
        refused=counts["refused"],
        prompts=len(LENGTHS),
        longest=LENGTHS[-1],
        rows="\n".join(rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", default=[], metavar="CLASS")
    parser.add_argument("--cluster", action="store_true", help="compare in a cluster, too, and after a kill")
    parser.add_argument(
        "--known", type=Path, help="verdicts of earlier runs, which this one adds to", metavar="JSON"
    )
    parser.add_argument("--page", type=Path, help="write the page here")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    if args.known is not None and args.known.exists():
        known = json.loads(args.known.read_text())
    for name, kind in architectures().items():
        if args.only and name not in args.only:
            continue
        if name not in known or args.only:
            found = verdict(name, kind)
            if found.by == "modules":
                try:
                    tokens = compared(name, kind, cluster=args.cluster)
                except (*ERRORS, OSError) as error:
                    tokens = f"not compared: {words_of(error)}"
                found = Verdict("modules", tokens=tokens)
            known[name] = asdict(found)
            print(name, found, flush=True)
            if args.known is not None:
                args.known.write_text(json.dumps(known, indent=1, sort_keys=True))
    if args.page is not None:
        named = {name: Verdict(**known[name]) for name in architectures() if name in known}
        args.page.write_text(page_of(named))


if __name__ == "__main__":
    main()
