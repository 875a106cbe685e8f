#!/usr/bin/env bash
# transformers 5.23.0: LlamaTokenizer leaves out the normalization of a `tokenizer.model`, also with `use_fast=False`.
#
# A sentencepiece model says how a text is normalized before it is split. By default that is NFKC, and one space in place of
# several; the model's training saw nothing else. transformers 4 had a slow tokenizer that asked sentencepiece, and
# OpenLLaMA's page says to use it. transformers 5 takes `use_fast=False` without a word, and makes the same tokenizer for
# both values, which only replaces spaces. So ligatures, full-width digits and separate accents become bytes, and several
# spaces become tokens. For the fast tokenizer this is known (huggingface/transformers, issue 25069). Models with
# the rule `identity`, such as Llama 2's, are right.
#
# Seen, with a small model trained with sentencepiece's defaults; sentencepiece, then transformers (both values of use_fast):
#     'the fine table'    ▁the ▁fine ▁table  the same
#     'the ﬁne table'     ▁the ▁fine ▁table  ▁the ▁ <0xEF> <0xAC> <0x81> ne ▁table
#     'table １２'         ▁table ▁12         ▁table ▁ <0xEF> <0xBC> <0x91> <0xEF> <0xBC> <0x92>
#     'the  fine   table'  ▁the ▁fine ▁table  ▁the ▁ ▁fine ▁ ▁ ▁table
# With the rule `identity` and all spaces kept, all four are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 sentencepiece==0.2.1 protobuf==7.36.2
cat > "$folder/try.py" <<'PY'
import json
import pathlib
import sys

import sentencepiece
from transformers import AutoTokenizer

TEXTS = ["the fine table", "the \ufb01ne table", "table \uff11\uff12", "the  fine   table"]
DEFAULTS, IDENTITY = {}, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
folder = pathlib.Path(sys.argv[1]) / "model"
folder.mkdir()
names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
(folder / "tokenizer_config.json").write_text(json.dumps(names))
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
sentences = ["the fine table 12", "a fine table for the other 12", "the answer is fine", "table of fine answers"] * 50
differ = {}
for rules in DEFAULTS, IDENTITY:
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=file, vocab_size=310, model_type="bpe",
            byte_fallback=True, minloglevel=2, **rules,
        )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizers = [AutoTokenizer.from_pretrained(folder, use_fast=fast) for fast in (False, True)]
    print(rules or "sentencepiece's defaults")
    for text in TEXTS:
        expected = original.encode(text, out_type=str)
        slow, fast = (tokenizer.tokenize(text) for tokenizer in tokenizers)
        print("   ", repr(text), *expected, "|", *(["the same"] if slow == expected else slow))
        differ[not rules, text] = (slow != expected, fast != expected)
right = {(default, text): (default and text != TEXTS[0],) * 2 for default in (True, False) for text in TEXTS}
sys.exit(differ != right)
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder"
