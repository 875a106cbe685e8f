#!/usr/bin/env bash
# xgrammar 0.2.8: a number with a bound has at most six decimals and no exponent, so a model that writes 3e-7 gives 3.
#
# pydantic's `PositiveFloat` or `Field(ge=0, le=1)` become `exclusiveMinimum`, `minimum` and `maximum`. With any of these
# xgrammar allows up to six digits after the point, and no `e`. JSON Schema has no such limit, and without a bound
# xgrammar has none. A rate of learning, a tolerance or a probability below 0.000001 cannot be written: after "3" the
# model must end or write more digits, and after "0.00000" it must write one digit. The answer fits the schema, so no
# check finds the fault, and no warning is given. llguidance 1.9.1 takes 0.0000003 with these bounds, and no exponent.
# xgrammar is the default of vLLM and SGLang for output in a schema.
#
# Seen: bounds, the number, how far the model can write it, and which characters may follow there:
#     {}                               3e-7           3e-7           (all)
#     {"exclusiveMinimum": 0}          3e-7           3              .0123456789 or the end
#     {}                               0.0000003      0.0000003      (all)
#     {"exclusiveMinimum": 0}          0.0000003      0.00000        123456789
#     {"minimum": 0, "maximum": 1}     0.0000003      0.000000       the end
#     {"minimum": -180, "maximum": 180}  -122.4194155  -122.419415   the end
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xgrammar==0.2.8 torch==2.13.0 transformers==5.23.0 numpy==2.4.2
cat > "$folder/try.py" <<'PY'
import json
import sys

import xgrammar

END = 256
ROWS = [
    ({}, "3e-7", "3e-7", None),
    ({"exclusiveMinimum": 0}, "3e-7", "3", ".0123456789<end>"),
    ({}, "0.0000003", "0.0000003", None),
    ({"exclusiveMinimum": 0}, "0.0000003", "0.00000", "123456789"),
    ({"minimum": 0, "maximum": 1}, "0.0000003", "0.000000", "<end>"),
    ({"minimum": -180, "maximum": 180}, "-122.4194155", "-122.419415", "<end>"),
]
vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(END)] + [b"<end>"], stop_token_ids=[END])
compiler = xgrammar.GrammarCompiler(vocabulary)
differ = False
for bounds, number, *expected in ROWS:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps({"type": "number", **bounds})))
    written = ""
    while written != number and matcher.accept_token(ord(number[len(written)])):
        written += number[len(written)]
    following = None
    if written != number:
        mask = xgrammar.allocate_token_bitmask(1, END + 1)
        matcher.fill_next_token_bitmask(mask)
        allowed = [token for token in range(END + 1) if int(mask[0, token // 32]) >> token % 32 & 1]
        following = "".join("<end>" if token == END else chr(token) for token in allowed)
    print(f"{json.dumps(bounds):34} {number:13} {written:12} {following}")
    differ |= [written, following] != expected
sys.exit(differ)
PY
"$folder/venv/bin/python" "$folder/try.py"
