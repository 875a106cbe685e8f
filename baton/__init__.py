"""Disaggregated prefill/decode LLM inference. Each package is a folder of the repository's top level."""
