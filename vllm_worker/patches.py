"""What Baton mends in vLLM, by version. Without vLLM itself, until a patch is applied.

A patch goes when no tested version needs it, which a test asserts. All of them need `state_chunks`, once vLLM
has loaded a model with states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from baton.vllm_worker.version import TESTED, Version, installed_release

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Process = Literal["engine", "model"]
"""Where a patch belongs: the process that starts vLLM's, or those with scheduler and model."""


@dataclass(frozen=True, slots=True)
class Patch:
    process: Process
    helps: Callable[[VllmConfig], bool]
    """Whether a configuration needs it."""
    function: str
    """A module of this package and its function without arguments, which is called before the first step. It
    may be called again."""
    last: Version = TESTED[1]
    """The last version that needs it, as far as known. Newer ones may need it, too, if it is the last one
    that is tested."""

    def apply(self) -> None:
        module, _, name = self.function.partition(".")
        getattr(import_module(f"baton.vllm_worker.{module}"), name)()

    def is_for(self, release: Version) -> bool:
        return release <= self.last or self.last == TESTED[1]


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _has_group(config: VllmConfig) -> bool:
    return config.parallel_config.data_parallel_size > 1


PATCHES: Sequence[Patch] = (
    Patch("engine", _has_group, "coordinator.tie_coordinators"),
    Patch(
        "engine",
        lambda config: _on_cpu() and config.cache_config.mamba_cache_mode == "align",
        "cpu_states.cut_prompts_at_blocks",
    ),
    Patch("model", lambda config: _on_cpu() and _has_group(config), "cpu_experts.add_collectives"),
    Patch(
        "model",
        lambda config: _on_cpu() and config.speculative_config is not None,
        "cpu_drafts.repeat_what_drafts_are_sampled_with",
    ),
    Patch("model", lambda _: True, "grammars.find_no_special_tokens_in_texts"),
)


def mend(process: Process, config: VllmConfig) -> None:
    """Applies the patches for this process, the installed version and this configuration."""
    release = installed_release()
    for patch in PATCHES:
        if patch.process == process and patch.is_for(release) and patch.helps(config):
            patch.apply()
