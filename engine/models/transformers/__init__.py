"""Models that the modules of Hugging Face transformers compute, with Baton's attention, cache and loader.

config.json ─▶ modules on the device "meta" ─▶ one pass that records each call of attention
            ─▶ the same modules with weights of our loader; attention is the runner's

Any causal language model whose layers call transformers' attention interface fits, if a check at load
(`engine.execution.module_check`) finds that both compute the same. Images come as in own classes: modules get
the embeddings of an encoder, and their positions. transformers is imported late: only such models need
it.
"""
