"""Tokens are those of transformers for the same file, and decoding restores the text."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.pre_tokenizers import Digits, Sequence

from baton.engine.loader.tokenizer_json import vocabulary
from baton.kv_names import vocabulary_fingerprint
from baton.router.api.messages import Message
from baton.router.text.chat import ChatTemplate, ChatTemplateError
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer

from .conftest import encode_chat

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\n\n  end",
    "numbers 0 12 345 6789 3.14159 1e-9 2024-01-01",
    "The don't-won't of 's and 'll; it's",
    "Größe, naïve café, Zürich — “quoted” … €",
    "今日の天気は晴れです。 漢字かな交じり文",
    "Привет, как дела? Ελληνικά שלום مرحبا नमस्ते",
    "🙂🚀👩‍👩‍👧‍👦🇩🇪 a🙂b",
    "e\u0301 combining, \u200bzero width, \ufeffBOM, \u00a0nbsp",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\tif not x:\n\t\tpass",
    '{"a": [1, 2, {"b": null}], "c": "d\\n"}',
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 42); }",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<repo_name>d<empty_output>",
    "<|im_start|><|im_start|> <|im_start |> <|nothing|>",
    "https://example.org/a?b=c&d=%20#e",
    "\x00\x01\x7f control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "word " * 500,
]  # fmt: skip
MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief. <|im_end|>"}, {"role": "user", "content": "Größe? 🙂"}],
    [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "Apple."},
        {"role": "user", "content": "Another."},
    ],
]


@pytest.fixture(scope="module")
def reference(embedded_model_path: Path):
    import transformers  # here, because this import takes seconds

    folder, name = embedded_model_path.parent, embedded_model_path.name
    read: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The tokenizer.json of the model has this step, too, which transformers leaves out for a GGUF file.
    steps = [Digits(individual_digits=True), read.backend_tokenizer.pre_tokenizer]
    read.backend_tokenizer.pre_tokenizer = Sequence(steps)
    return read


@pytest.mark.all
def test_router_and_worker_compute_the_same_vocabulary_fingerprint(
    tokenizer: ModelTokenizer, embedded_model_path: Path, directory: Path, tmp_path: Path
) -> None:
    """GGUF file and directory have the same fingerprint. A changed vocabulary has another one."""
    for source in (embedded_model_path, directory):
        theirs = vocabulary_fingerprint(vocabulary(str(source)))
        assert (
            theirs == tokenizer.vocabulary_fingerprint == load_tokenizer(str(source)).vocabulary_fingerprint
        )
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    changed = json.loads((tmp_path / "tokenizer.json").read_text())
    changed["added_tokens"].append({**changed["added_tokens"][0], "content": "<new>", "id": 49152})
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    theirs = vocabulary_fingerprint(vocabulary(str(tmp_path)))
    assert theirs == load_tokenizer(str(tmp_path)).vocabulary_fingerprint != tokenizer.vocabulary_fingerprint
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        vocabulary(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert vocabulary_fingerprint(vocabulary(str(tmp_path))) == ""


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    starts = (0x20, 0x80, 0x380, 0x410, 0x640, 0x2070, 0x4E00, 0x1F600)
    pieces = [" ", "\n", "  ", "<|im_end|>", "1", "23", "'s", "\u0301"]

    def piece() -> str:
        return rng.choice(pieces) if rng.random() < 0.3 else chr(rng.choice(starts) + rng.randrange(80))

    return ["".join(piece() for _ in range(rng.randrange(60))) for _ in range(count)]


GOLDENS = json.loads((Path(__file__).parents[1] / "system" / "goldens.json").read_text())


@pytest.mark.parametrize("golden", GOLDENS, ids=range(len(GOLDENS)))
def test_token_ids_are_those_that_transformers_recorded(tokenizer: ModelTokenizer, golden: dict[str, Any]):
    """Texts in many scripts. The long tests below compare thousands more with transformers."""
    made = (
        tokenizer.encode(golden["prompt"])
        if "prompt" in golden
        else encode_chat(tokenizer, golden["messages"])
    )
    assert made == golden["prompt_ids"]


@pytest.mark.long
def test_tokens_are_those_of_transformers(tokenizer: ModelTokenizer, reference):
    for text in [*TEXTS, *random_texts(2000)]:
        assert tokenizer.encode(text) == reference(text)["input_ids"], repr(text)


@pytest.mark.long
@pytest.mark.parametrize("messages", MESSAGES)
def test_chat_prompts_are_those_of_transformers(tokenizer: ModelTokenizer, reference, messages):
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.chat_template.render(messages) == expected
    assert encode_chat(tokenizer, messages) == reference(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.long
def test_decoding_is_that_of_transformers(tokenizer: ModelTokenizer, reference):
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == reference.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_survives_the_round_trip(tokenizer: ModelTokenizer):
    for text in [*TEXTS, *random_texts(200)]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.all
def test_a_router_never_imports_torch(directory: Path):
    code = f"""
import sys
import baton.router.text.model_files, baton.router.server
from baton.router.text.tokenizer import load_tokenizer
load_tokenizer({str(directory)!r})
assert not {{"torch", "transformers", "engine"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---------------------------------------------------------------- Hugging Face directories


@pytest.mark.all
def test_a_directory_gives_the_same_tokens(directory: Path, tokenizer: ModelTokenizer):
    other = load_tokenizer(str(directory))
    assert (other.max_model_len, other.vocab_size) == (8192, tokenizer.vocab_size)
    for text in TEXTS:
        ids = other.encode(text)
        assert ids == tokenizer.encode(text)
        assert other.decode(ids) == tokenizer.decode(ids)
    assert encode_chat(other, MESSAGES[1]) == encode_chat(tokenizer, MESSAGES[1])


def test_the_context_of_a_model_that_also_sees_images_is_that_of_its_text_model(
    small_directory: Path, tmp_path: Path
):
    copy = shutil.copytree(small_directory, tmp_path / "copy")
    for config, context in (
        ({"text_config": {"max_position_embeddings": 4096}, "vision_config": {}}, 4096),
        ({"max_position_embeddings": 2048, "text_config": None}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 8192),
    ):
        (copy / "config.json").write_text(json.dumps(config))
        assert load_tokenizer(str(copy)).max_model_len == context
    (copy / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(ValueError, match=r"config\.json has no max_position_embeddings"):
        load_tokenizer(str(copy))


@pytest.mark.all
def test_a_tokenizer_from_elsewhere(directory: Path, tmp_path: Path, tokenizer: ModelTokenizer):
    """The context stays that of the model, which needs no tokenizer of its own."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    with pytest.raises(ValueError, match=r"has no tokenizer\.json$"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tiktoken.model").touch()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json .*can be converted"):
        load_tokenizer(str(tmp_path))
    loaded = load_tokenizer(str(tmp_path), tokenizer=str(directory))
    assert loaded.max_model_len == 77
    assert loaded.vocabulary_fingerprint == tokenizer.vocabulary_fingerprint
    assert encode_chat(loaded, MESSAGES[1]) == encode_chat(tokenizer, MESSAGES[1])
    with pytest.raises(ValueError, match=r"--tokenizer \./none: there is no such file"):
        load_tokenizer(str(tmp_path), tokenizer="./none")


@pytest.mark.all
def test_a_template_gets_the_variables_that_transformers_gives(small_directory: Path, tmp_path: Path):
    """Named tokens of either file, those that a model names itself, and `documents`. A client sets no token,
    other than there: `test_tools` shows it."""
    import transformers

    model = shutil.copytree(small_directory, tmp_path / "model")
    named = [f"{name}_token" for name in ("bos", "unk", "pad", "mask", "image", "boi")]
    source = "".join(
        f"{{{{ {name} }}}}|{{{{ {name} is defined }}}}|{{{{ {name} is none }}}};"
        for name in (*named, "documents", "tools")
    )
    (model / "chat_template.jinja").write_text(source)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens = {"pad_token": "<|im_end|>", "extra_special_tokens": {"image_token": "<|im_start|>"}}
    tokens |= {"boi_token": "<|im_end|>", "add_bos_token": False}
    in_object = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    for bos in ("<|im_start|>", in_object, None):
        path.write_text(json.dumps({**config, **tokens, "bos_token": bos, "eos_token": "<|im_end|>"}))
        theirs: Any = transformers.AutoTokenizer.from_pretrained(model)
        ours = load_tokenizer(str(model)).chat_template
        assert ours.render(MESSAGES[0]) == theirs.apply_chat_template(
            MESSAGES[0], tokenize=False, add_generation_prompt=True
        )
        given = {"documents": [{"title": "t", "text": "x"}]}
        assert ours.render(MESSAGES[0], settings=given) == theirs.apply_chat_template(
            MESSAGES[0], tokenize=False, add_generation_prompt=True, **given
        )


def test_the_chat_template_of_each_possible_file(small_directory: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(small_directory, model)
    (model / "chat_template.jinja").write_text("file: {{ messages[0].content }} {{ eos_token }}")
    rendered = load_tokenizer(str(model)).chat_template.render(MESSAGES[0])
    assert rendered == f"file: {MESSAGES[0][0]['content']} <|im_end|>"
    (tmp_path / "given.jinja").write_text("given{% generation %}!{% endgeneration %}")
    given = load_tokenizer(str(model), chat_template=str(tmp_path / "given.jinja"))
    assert given.chat_template.render(MESSAGES[0]) == "given!"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_templates_are_sandboxed_and_may_refuse_messages(
    small_directory: Path, tmp_path: Path, template, reason
):
    (tmp_path / "t.jinja").write_text(template)
    loaded = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(ValueError, match=reason):
        loaded.chat_template.render(MESSAGES[0])


OF_QWEN3_5 = """{%- macro shown(content) %}{%- if content is string %}{{- content }}
{%- elif content is none or content is undefined %}{{- '' }}
{%- else %}{{- raise_exception('Unexpected content type.') }}{%- endif %}{%- endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}{%- if m.role == 'user' and ns.last < 0 %}
{%- set ns.last = messages|length - loop.index0 - 1 %}{%- endif %}{%- endfor %}
{%- if ns.last < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('System message must be first.') }}
{%- endif %}
{{- '<' + m.role + '>' + shown(m.content)|trim }}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}{{- '[' + m.reasoning_content + ']' }}
{%- endif %}
{%- if m.tool_calls and m.tool_calls is iterable and m.tool_calls is not mapping %}
{%- for tool_call in m.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- tool_call.name }}
{%- for name, value in tool_call.arguments|items %}
{{- ' ' + name + '=' }}{{- value | tojson | safe if value is mapping else value | string }}
{%- endfor %}{%- endfor %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant><think>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '</think>' }}{%- endif %}{%- endif %}"""
"""As in published templates, in short: what their authors use of Jinja and of messages."""
OF_LFM2_5 = """{{- bos_token -}}{%- for message in messages -%}
{%- if message.thinking is defined -%}{{- "<think>" + message.thinking + "</think>" -}}{%- endif -%}
{{- message.content -}}
{%- if message.tool_calls is defined -%}{%- generation -%}{%- for call in message.tool_calls -%}
{%- set ns = namespace(of=[]) -%}
{%- for name, value in call["function"]["arguments"].items() -%}
{%- set ns.of = ns.of + [name + "=" + (value | string)] -%}{%- endfor -%}
{{- call["function"]["name"] + "(" + (ns.of | join(", ")) + ")" -}}
{%- endfor -%}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"""


def test_templates_of_recent_models_get_what_they_read() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": {"y": 1}, "z": 2}'}}
    given: list[dict[str, Any]] = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]},
        {"role": "tool", "content": "8", "tool_call_id": "a"},
    ]
    messages = [Message.model_validate(each).for_template() for each in given]
    qwen, lfm = (ChatTemplate(source, None, {"bos_token": "^"}) for source in (OF_QWEN3_5, OF_LFM2_5))
    shown = '<system>One.\n\nTwo.<user>Hi<assistant>[why]f x={"y": 1} z=2<tool>8<assistant><think>'
    assert qwen.render(messages) == shown
    assert qwen.render(messages, settings={"enable_thinking": False}) == f"{shown}</think>"
    with pytest.raises(ChatTemplateError, match="No user query found"):
        qwen.render(messages[:1])
    assert lfm.render(messages[2:]) == "^Hi<think>why</think>f(x={'y': 1}, z=2)8"
    said = Message.model_validate({**given[3], "content": "Look."}).for_template()
    assert "thinking" not in said, "the template of gpt-oss refuses both with a call"


def test_bytes_of_sentencepiece_tokens(tmp_path: Path, directory: Path):
    shutil.copytree(directory, tmp_path / "m")
    vocab = {"<unk>": 0, "▁Hi": 1, "▁": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x99>": 5, "<0x82>": 6, "x": 7}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    d = tokenizers.decoders
    made.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    made.save(str(tmp_path / "m" / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "m")).decode([1, 2, 3, 4, 5, 6, 7]) == "Hi 🙂x"


# ---------------------------------------------------------------- what users get wrong


def test_the_error_of_a_model_that_cannot_be_loaded(small_directory: Path, tmp_path: Path, monkeypatch):
    def refused(match: str, model: Path | str, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            load_tokenizer(str(model), **more)

    refused("no such file", tmp_path / "absent.gguf")
    refused("no tokenizer.json", tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 100)
    refused("not a GGUF file", tmp_path / "x.gguf")
    refused("--chat-template", small_directory, chat_template=str(tmp_path / "absent.jinja"))
    (tmp_path / "broken.jinja").write_text("{% if %}")
    refused("not valid Jinja", small_directory, chat_template=str(tmp_path / "broken.jinja"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    broken = tmp_path / "broken"
    shutil.copytree(small_directory, broken)
    (broken / "tokenizer.json").write_text("{}")
    refused("cannot be loaded", broken)
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(broken / "tokenizer.json"))
    refused("WordPiece, which is not supported", broken)


def test_a_gguf_file_that_is_cut_short_is_refused(embedded_model_path: Path, tmp_path: Path):
    path = tmp_path / "cut.gguf"
    with embedded_model_path.open("rb") as whole:
        header = whole.read(1_600_000)
    for length in (0, 3, 20, 500, 5_000, 1_000_000):
        path.write_bytes(header[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf: (empty|corrupt or cut short)"):
            load_tokenizer(str(path))


def test_other_kinds_of_gguf_tokenizers_are_refused_by_name(tmp_path: Path):
    import gguf

    for kind, split, reason in (
        ("bert", "default", "kind 'bert'"),
        ("gpt2", "mystery", "text as 'mystery'"),
    ):
        path = tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(split)
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}",
            " one ",
            "[user]Hi</s>[assistant] one ",
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }} </s>{% endfor %}",
            " one ",
            "[user]Hi </s>[assistant]one",
        ),
    ],
)
def test_the_final_message_can_be_continued(source: str, content: str, expected: str):
    """As in transformers: the text ends with the content, without spaces that the template strips."""
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert messages[-1]["content"] == content
    forgetful = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="leaves out the last message"):
        forgetful.render(messages, continue_final_message=True)
