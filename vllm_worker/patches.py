"""What Baton mends in vLLM, by version. Without vLLM itself, until a patch is applied.

A patch goes when no tested version needs it, which a test asserts. All of them need `state_chunks`, once vLLM
has loaded a model with states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    apply: Callable[[], None]
    """Before the first step. May be repeated."""
    last: Version = TESTED[1]
    """The last version that needs it, as far as known. Newer ones may need it, too, if it is the last one
    that is tested."""

    def is_for(self, release: Version) -> bool:
        return release <= self.last or self.last == TESTED[1]


def _tie_coordinators() -> None:
    from baton.vllm_worker.coordinator import tie_coordinators

    tie_coordinators()


def _cut_prompts_at_blocks() -> None:
    from baton.vllm_worker.cpu_states import cut_prompts_at_blocks

    cut_prompts_at_blocks()


def _add_collectives() -> None:
    from baton.vllm_worker.cpu_experts import add_collectives

    add_collectives()


def _repeat_what_drafts_are_sampled_with() -> None:
    from baton.vllm_worker.cpu_drafts import repeat_what_drafts_are_sampled_with

    repeat_what_drafts_are_sampled_with()


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _has_group(config: VllmConfig) -> bool:
    return config.parallel_config.data_parallel_size > 1


PATCHES: Sequence[Patch] = (
    Patch("engine", _has_group, _tie_coordinators),
    Patch(
        "engine",
        lambda config: _on_cpu() and config.cache_config.mamba_cache_mode == "align",
        _cut_prompts_at_blocks,
    ),
    Patch("model", lambda config: _on_cpu() and _has_group(config), _add_collectives),
    Patch(
        "model",
        lambda config: _on_cpu() and config.speculative_config is not None,
        _repeat_what_drafts_are_sampled_with,
    ),
)


def mend(process: Process, config: VllmConfig) -> None:
    """Applies the patches for this process, the installed version and this configuration."""
    release = installed_release()
    for patch in PATCHES:
        if patch.process == process and patch.is_for(release) and patch.helps(config):
            patch.apply()
