"""Models that transformers' modules compute, in a cluster whose decode worker loses its engine."""

from pathlib import Path

import pytest

from docs.lab.models import by_cluster, differences, prompts_of, write_small

pytestmark = pytest.mark.long

KINDS = {
    "Olmo3ForCausalLM": "olmo3", "Mistral4ForCausalLM": "mistral4", "Gemma2ForCausalLM": "gemma2",
    "OlmoHybridForCausalLM": "olmo_hybrid", "JambaForCausalLM": "jamba",
}  # fmt: skip
"""The last two have states, of which one does not continue within a prompt."""


@pytest.mark.parametrize("name", KINDS)
async def test_a_cluster_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_small(name, KINDS[name], tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    for answers in await by_cluster(tmp_path, prompts):
        assert [*differences(model, prompts, answers)] == []
