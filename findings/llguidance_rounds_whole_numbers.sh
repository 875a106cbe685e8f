#!/usr/bin/env bash
# llguidance 1.9.1: a schema's `const` or `enum` of a whole number above 2**53 forces the model to write another number.
#
# JSON has no limit of whole numbers, and identifiers of 64 bits are common: Discord's, X's, a row's in a database. The
# compiler reads a schema's numbers as doubles, without an error or a warning, though it refuses each key that it
# cannot enforce (`uniqueItems`, `not`). So the text that the schema asks for is refused, and the only text that is
# left to the model names something else. `minimum` and `maximum` move in the same way. Python's json, jsonschema
# and jsonschema-rs read such numbers exactly.
#
# Seen: what the grammar forces, and whether it lets the model write the number of the schema:
#     {"const": 1234567890123456789}                     1234567890123456768   False
#     {"enum": [9007199254740993]}                       9007199254740992      False
#     {"type": "integer", "minimum": N, "maximum": N}    9007199254740992      False   (N = 9007199254740993)
#     {"const": 9007199254740991}                        9007199254740991      True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
cat > "$folder/try.py" <<'PY'
import json
import sys

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A vocabulary of all bytes and an end."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
odd, safe = 2**53 + 1, 2**53 - 1
long = 1234567890123456789
rows = [
    (long, {"const": long}),
    (odd, {"enum": [odd]}),
    (odd, {"type": "integer", "minimum": odd, "maximum": odd}),
    (safe, {"const": safe}),
]
seen = []
for number, schema in rows:
    text = str(number)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    forced = bytes(matcher.compute_ff_tokens()).decode()
    allowed = matcher.validate_tokens(list(text.encode())) == len(text)
    print(json.dumps(schema), forced, allowed)
    seen.append((forced, allowed))
sys.exit(seen != [("1234567890123456768", False), (str(odd - 1), False), (str(odd - 1), False), (str(safe), True)])
PY
"$folder/venv/bin/python" "$folder/try.py"
