"""A vLLM engine as a process of its own Python, since vLLM's packages do not fit ours.

    .venv-vllm/bin/python -m tests.vllm_worker.vllm_server MODEL ARGUMENTS QUESTIONS ANSWERS

The last two are descriptors: the input and the output of the engine. The second has the arguments of vLLM's
engine as JSON. Of these, `kv_transfer_config` has those of its own class. With `graphs` every second step
calls no hooks of layers, as a step that one CUDA graph holds. With `one_process` vLLM's scheduler is in the
process with the model, as on one GPU. With `states` its blocks begin with NaN, and prefixes of Mamba-2 can be
cached, as in a worker.

An engine prints an empty line when it is up. Each line of its input is a list of requests, as JSON: [prompt,
fields of SamplingParams, kv_transfer_params or null]. The answer is a line, too: of each request [tokens,
kv_transfer_params or null], then how many preemptions there were so far, how many tokens of prompts were
cached, and how many steps whose prompts the connector has bounded.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, TextIO
from unittest.mock import Mock

from setproctitle import setproctitle

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # It needs Triton. Where there is no GPU, Triton's interpreter takes the place of a backend for CPUs.
    from triton.backends import backends

    os.environ["TRITON_INTERPRET"] = "1"
    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def main() -> None:
    model, arguments, questions, answers = sys.argv[1:]
    setproctitle("vllm_server.py")
    with os.fdopen(int(questions)) as asked, os.fdopen(int(answers), "w") as told:
        serve(model, json.loads(arguments), asked, told)


def serve(model: str, arguments: dict[str, Any], questions: TextIO, answers: TextIO) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.inputs import TokensPrompt

    from baton.vllm_worker.cpu_states import cut_prompts_at_blocks

    if arguments.pop("one_process", False):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if arguments.pop("graphs", False):
        use_graphs()
    if arguments.pop("states", False):
        cut_prompts_at_blocks()
        fill_with_nan()
    if connector := arguments.get("kv_transfer_config"):
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="baton.vllm_worker.connector",
            **connector,
        )
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 512,  # vLLM touches all of them, and takes 1 GiB for itself
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    bounded = count_bounded_steps()
    engine = LLM(model, **defaults | arguments)
    print(file=answers, flush=True)
    for line in questions:
        requests = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _, _ in requests]
        params = [
            SamplingParams(
                detokenize=False, extra_args={"kv_transfer_params": said} if said else None, **fields
            )
            for _, fields, said in requests
        ]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        told = [[list(x.outputs[0].token_ids), x.kv_transfer_params] for x in outputs]
        counts: Any = engine.get_metrics()
        names = "vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_accepted_tokens"
        found = [sum(x.value for x in counts if x.name == name) for name in names]
        print(json.dumps([told, *found, *bounded]), file=answers, flush=True)


def count_bounded_steps() -> list[int]:
    """Returns a list with their number. None if the scheduler is in another process. In a worker, each step
    has at most one prompt that it does not end."""
    from baton.vllm_worker.connector import BatonConnector

    build, steps, prompts = BatonConnector.build_connector_meta, [0], dict[str, int]()

    def checked(self: BatonConnector, scheduler_output: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:  # with model runner V2 also those that go on
            prompts.setdefault(new.req_id, len(new.prompt_token_ids))
        for preempted in scheduler_output.preempted_req_ids or ():
            prompts[preempted] = 0  # it computes its output again, too
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        going_on = [x for x in computed if computed[x] + counts[x] < prompts.get(x, 0)]
        assert len(going_on) <= 1 or not self._settings.attach, going_on
        bound = self._vllm_config.scheduler_config.long_prefill_token_threshold
        largest = max(scheduler_output.num_scheduled_tokens.values(), default=0)
        if bound > 1:
            assert largest <= bound
            steps[0] += largest == bound
        return build(self, scheduler_output)

    BatonConnector.build_connector_meta = checked
    return steps


def use_graphs() -> None:
    from baton.vllm_worker.connector import BatonConnector

    bind, save, steps = (
        BatonConnector.bind_connector_metadata,
        BatonConnector.save_kv_layer,
        itertools.count(),
    )

    def bound(self: BatonConnector, connector_metadata: Any) -> None:
        bind(self, connector_metadata)
        held = bool(connector_metadata.chunks) and next(steps) % 2
        self.save_kv_layer = Mock() if held else functools.partial(save, self)

    BatonConnector.bind_connector_metadata = bound


def fill_with_nan() -> None:
    from baton.vllm_worker.connector import BatonConnector

    register = BatonConnector.register_kv_caches

    def filled(self: BatonConnector, kv_caches: dict[str, Any]) -> None:
        for cache in kv_caches.values():
            for tensor in cache if isinstance(cache, list) else [cache]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        register(self, kv_caches)

    BatonConnector.register_kv_caches = filled


if __name__ == "__main__":
    main()
