#!/usr/bin/env bash
# xgrammar 0.2.8: a `pattern` with a backslash, a quotation mark or a newline forces the model to write other text, or no JSON.
#
# A pattern of JSON Schema describes a string's value. xgrammar compares it with the text between the quotation marks,
# where JSON writes a backslash as two and a quotation mark as \". So a pattern for a path of Windows forces a single
# backslash: \t and \n are read as a tab and a newline, and \u and \s are no JSON. No warning is given. The right text,
# which a model would write, is refused. For `const` and `enum` the text is escaped. That `pattern` refuses each escape is known
# (mlc-ai/xgrammar, issue 800), that it forces wrong text is not. llguidance 1.9.1 takes the right text of each.
# xgrammar is the default of vLLM and SGLang for output in a schema.
#
# Seen: the value that a pattern asks for, the text that the grammar forces, and what json.loads makes of it:
#     C:/temp    "C:/temp"   'C:/temp'
#     C:\temp    "C:\temp"   'C:\temp' with a tab in place of \t
#     C:\users   "C:\users"  no JSON: Invalid \uXXXX escape
#     say "yes"  "say "yes"" no JSON: Extra data
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xgrammar==0.2.8 torch==2.13.0 transformers==5.23.0 numpy==2.4.2
cat > "$folder/try.py" <<'PY'
import json
import re
import sys

import xgrammar

EXPECTED = {
    "C:/temp": "C:/temp",
    "C:\\temp": "C:\temp",
    "C:\\users": None,
    'say "yes"': None,
}
vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(vocabulary)
seen, right = {}, {}
for value in EXPECTED:
    pattern = f"^{re.escape(value)}$".replace("\\ ", " ")  # ECMA 262 has no escape of a space
    assert re.search(pattern, value)
    grammar = compiler.compile_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    forced = xgrammar.GrammarMatcher(grammar).find_jump_forward_string()
    right[value] = xgrammar.GrammarMatcher(grammar).accept_string(json.dumps(value))
    try:
        seen[value] = json.loads(forced)
        said = repr(seen[value])
    except json.JSONDecodeError as error:
        seen[value], said = None, f"no JSON: {error.msg}"
    print(f"{value:10} {forced:11} {said}, right text accepted: {right[value]}")
sys.exit(seen != EXPECTED or [*right.values()] != [True, False, False, False])
PY
"$folder/venv/bin/python" "$folder/try.py"
