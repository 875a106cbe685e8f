#!/usr/bin/env bash
# llama.cpp of October 2026 (xllamacpp 2026.10.11549): a model reads its own tool calls with numbers of six digits.
#
# A client sends the earlier tool calls of a conversation back as they came, with arguments as a text of JSON. The server
# parses this text for templates that write `arguments | tojson`, such as Qwen3's. Its own engine for templates prints
# each floating-point number with six digits. So the place below moves by 28 m and the time by 53 minutes. A whole number
# from 2**63 on becomes negative. Numbers in the schemas of tools (`minimum`, `default`) change in the same way. Neither
# the log nor the documentation says so. As the text is not what the model wrote, the cached prefix ends there, too.
# Jinja2, with which transformers renders the same template, keeps every digit.
#
# Seen, first what the client sent, then what the model reads:
#     {"latitude": 52.520008, "longitude": -122.419416}   {"latitude": 52.52, "longitude": -122.419}
#     {"since": 1764543210.5, "amount": 1234567.89}       {"since": 1.76454e+09, "amount": 1.23457e+06}
#     {"hash": 12345678901234567890}                      {"hash": -6101065172474983726}
#     {"count": 1764543210, "name": "0.1234567"}          {"count": 1764543210, "name": "0.1234567"}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.2 jinja2==3.1.6
cat > "$folder/try.py" <<'PY'
import json, os, sys, urllib.request

import gguf, jinja2, numpy, xllamacpp

TEMPLATE = """
{%- for message in messages -%}
    <|{{ message.role }}|>{{ message.content }}
    {%- for call in message.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
SENT = [
    '{"latitude": 52.520008, "longitude": -122.419416}',
    '{"since": 1764543210.5, "amount": 1234567.89}',
    '{"hash": 12345678901234567890}',
    '{"count": 1764543210, "name": "0.1234567"}',
]
path = f"{sys.argv[1]}/model.gguf"
random = numpy.random.default_rng(0)
file = gguf.GGUFWriter(path, "llama")
file.add_context_length(512), file.add_embedding_length(64), file.add_block_count(1), file.add_vocab_size(64)
file.add_feed_forward_length(96), file.add_head_count(2), file.add_head_count_kv(2), file.add_rope_dimension_count(32)
file.add_layer_norm_rms_eps(1e-5), file.add_chat_template(TEMPLATE)
file.add_tokenizer_model("gpt2"), file.add_tokenizer_pre("gpt-2"), file.add_token_list([f"t{i}" for i in range(64)])
file.add_token_types([1] * 64), file.add_token_merges(["t 1"]), file.add_bos_token_id(0), file.add_eos_token_id(63)
shapes = {name: (64, 64) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
shapes |= {"attn_norm": 64, "ffn_norm": 64, "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (64, 64), "output_norm": 64}
for name, shape in shapes.items():
    file.add_tensor(f"{name}.weight", random.normal(0, 0.1, shape).astype(numpy.float32))
file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = path, 512, 0
parameters.warmup = parameters.fit_params = False
server = xllamacpp.Server(parameters)
environment = jinja2.Environment()
environment.filters["tojson"] = json.dumps  # as transformers has it
template = environment.from_string(TEMPLATE)
read = []
for arguments in SENT:
    call = {"id": "call_1", "type": "function", "function": {"name": "ask", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "done", "tool_call_id": "call_1"}]
    body, headers = json.dumps({"messages": messages}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.listening_address}/apply-template", body, headers)
    prompt = json.load(urllib.request.urlopen(request))["prompt"]
    call["function"]["arguments"] = json.loads(arguments)
    texts = [text.partition("<call>ask ")[2].partition("</call>")[0] for text in (prompt, template.render(messages=messages))]
    assert texts[1] == arguments, texts
    print(f"{arguments:51} {texts[0]}", flush=True)
    read.append(texts[0])
expected = ['{"latitude": 52.52, "longitude": -122.419}', '{"since": 1.76454e+09, "amount": 1.23457e+06}']
os._exit(read != [*expected, '{"hash": -6101065172474983726}', SENT[3]])  # threads of the server never end
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder" 2> "$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
