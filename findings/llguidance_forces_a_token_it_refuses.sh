#!/usr/bin/env bash
# llguidance 1.9.1: for a text that holds the name of an added token like <tool_call>, it allows one token alone, and refuses it.
#
# Qwen 3, GLM 4.5 and MiniMax M2 have such tokens, with "special": false: they are text that a model writes and a decoder
# shows. llguidance takes each added token with angle brackets for a special one, which no text of a grammar matches. But
# where a grammar forces a text, it asks the tokenizer for the tokens, and these hold the added token. So the mask allows
# this token alone, the model takes it, and `consume_token` ends the answer with an error. A token with square brackets is
# not taken for a special one, so the same grammar works for it. A grammar must name the token by its number, and
# the same text in another model has none. The documentation names neither.
#
# Seen, for a grammar of the text and a brace: number of allowed tokens, whether the first is the added token, and whether
# it is then taken:
#     start: "<tool_call>" "{"   1  True  False   token "…[257]" doesn't satisfy the grammar
#     start: <[257]> "{"         1  True  True
#     start: "[tool_call]" "{"   1  True  True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.23.3
cat > "$folder/try.py" <<'PY'
import struct
import sys

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END, ADDED = 256, 257
seen = []
for name, grammar in (
    ("<tool_call>", 'start: "<tool_call>" "{"'),
    ("<tool_call>", f'start: <[{ADDED}]> "{{"'),
    ("[tool_call]", 'start: "[tool_call]" "{"'),
):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<end>", name])
    assert tokenizer.encode(name + "{").ids[0] == tokenizer.token_to_id(name) == ADDED
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=END), grammar, log_level=0)
    mask = matcher.compute_bitmask()
    words = struct.unpack(f"<{len(mask) // 4}I", mask)
    allowed = [token for token in range(ADDED + 1) if words[token // 32] >> token % 32 & 1]
    taken = matcher.consume_token(allowed[0])
    print(f"{grammar:27} {len(allowed)} {allowed[0] == ADDED} {taken} {matcher.get_error()[:70]!r}")
    seen.append((len(allowed), allowed[0] == ADDED, taken))
sys.exit(seen != [(1, True, False), (1, True, True), (1, True, True)])
PY
"$folder/venv/bin/python" "$folder/try.py"
