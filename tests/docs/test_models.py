"""The verdicts on models of transformers."""

from docs.lab.models import Verdict, architectures, page_of, verdict


def test_the_walk_finds_classes_in_no_table() -> None:
    found = architectures()
    assert found["Mistral4ForCausalLM"] == "mistral4"
    assert found["LlamaForCausalLM"] == "llama"


def test_a_verdict_says_what_computes_a_model_or_why_none_does() -> None:
    assert verdict("LlamaForCausalLM", "llama") == Verdict("own")
    assert verdict("Olmo3ForCausalLM", "olmo3") == Verdict("modules")
    refused = verdict("MambaForCausalLM", "mamba")
    assert refused == Verdict("refused", "it never calls transformers' attention interface")
    page = page_of(
        {"MambaForCausalLM": refused, "LlamaForCausalLM": Verdict("own"), "RwkvForCausalLM": refused}
    )
    assert f"| refused | {refused.why} | MambaForCausalLM, RwkvForCausalLM |" in page
    assert "1 classes have a class of Baton" in page
