# ruff: noqa: E501
"""More ways in which models write calls, beside those that were reported: what other servers' parsers were tried with."""

import pytest

from baton.router.api.messages import Tool
from tests.reports.replay import Answer, Call, parse, splits

EDIT = {"path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}, "share": {"type": "number"},
        "force": {"type": "boolean"}, "lines": {"type": "array", "items": {"type": "integer"}}, "deep": {"type": "object"},
        "note": {"type": ["string", "null"]}}  # fmt: skip
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"properties": p, "required": [*p][:1]}}})
    for name, p in (("get_weather", {"city": {"type": "string"}, "unit": {"type": "string"}}), ("edit", EDIT), ("now", {}))
]  # fmt: skip

KINDS: dict[str, list[tuple[str, str, list[tuple[str, object]]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\d+ it\\\'s"}}\n</tool_call>', '', [('get_weather', {'city': "\\d+ it's"})]),  # bad escape
        ("<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Paris', 'ok': True, 'n': None}}\n</tool_call>", '', [('get_weather', {'city': 'Paris', 'ok': True, 'n': None})]),  # python dict
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris",},}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # trailing comma
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "now", "arguments": {}}\n</tool_call>', '', [('get_weather', {'city': 'Paris'}), ('now', {})]),  # two in one tag
        ('<tool_call>\n[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]\n</tool_call>', '', [('get_weather', {'city': 'Paris'}), ('now', {})]),  # list in tag
        ('<tool_call>\n{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # openai form
        ('<tool_call>\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # fence
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # closing twice
        ('<tool_call>\n{"name": "edit", "arguments": {"path": "a", "share": NaN}}\n</tool_call>', '', [('edit', {'path': 'a', 'share': 'NaN'})]),  # nan
        ('<tool_call>\n{"name": " get_weather ", "arguments": {"city": "Paris"}}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # ws name
    ],
    "llama3_json": [
        ('[{"name": "now", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Paris"}}]', '', [('now', {}), ('get_weather', {'city': 'Paris'})]),  # list
        ('```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```', '', [('get_weather', {'city': 'Paris'})]),  # fence
        ('{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"}}}', '', [('get_weather', {'city': 'Paris'})]),  # openai form
        ('First\n{"name": "now", "parameters": {}}\nand then\n{"name": "get_weather", "parameters": {"city": "Paris"}}\nDone.', 'First\nand then\nDone.', [('now', {}), ('get_weather', {'city': 'Paris'})]),  # between
        ('int main() { return 0; } {"name": "now", "parameters": {}}', 'int main() { return 0; }', [('now', {})]),  # code
        ("{'name': 'now', 'parameters': {}}", '', [('now', {})]),  # single quotes
        ('{"name": "get_weather", "parameters": {"city": "Paris"', '', [('get_weather', {'city': 'Paris'})]),  # missing end
        ('{"function": "get_weather", "parameters": {"city": "Paris"}}', '', [('get_weather', {'city': 'Paris'})]),  # function key
    ],
    "mistral": [
        ('[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Paris"}}', '', [('get_weather', {'city': 'Paris'})]),  # bare obj
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"[TOOL_CALLS]now[ARGS]{}', '', [('get_weather', {'city': 'Paris'}), ('now', {})]),  # cut args next
        ('[TOOL_CALLS][]', '', []),  # empty list
        ('[TOOL_CALLS]get_weather[ARGS]\'{"city": "Paris"}\'', '', [('get_weather', {'city': 'Paris'})]),  # as text in single quotes
        ('[TOOL_CALLS]now[ARGS][]', '', [('now', {})]),  # empty list
    ],
    "qwen3_coder": [
        ('<tool_call>\n<function=edit>\n<parameter=path>\n5\n</parameter>\n<parameter=line>\nfive\n</parameter>\n<parameter=force>\nTRUE\n</parameter>\n<parameter=share>\n1\n</parameter>\n</function>\n</tool_call>', '', [('edit', {'path': '5', 'line': 'five', 'force': True, 'share': 1})]),  # bad types
        ('<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n<parameter=line>\n"5"\n</parameter>\n</function>\n</tool_call>', '', [('edit', {'path': 'a', 'line': 5})]),  # quoted number
        ('<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n<parameter=deep>\n{"a": "x\ny"}\n</parameter>\n</function>\n</tool_call>', '', [('edit', {'path': 'a', 'deep': {'a': 'x\ny'}})]),  # raw newline json
        ('<tool_call>\n<function=now>\n</function>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>', '', [('now', {}), ('get_weather', {'city': 'Paris'})]),  # two in one
        ('<tool_call>\n<function=get_weather>\n<parameter=city>\nParis', '', [('get_weather', {'city': 'Paris'})]),  # no end at all
        ('<tool_call>\n<function= get_weather >\n<parameter= city >\nParis\n</parameter>\n</function>\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # space in tag
        ('<tool_call>\n<function="get_weather">\n<parameter="city">\nParis\n</parameter>\n</function>\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # quotes in tag
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # json in tag
        ('<tool_call>\nI call now.\n<function=now>\n</function>\n</tool_call>', '', [('now', {})]),  # text in function
        ('<tool_call>\n<function=get_weather>\nok\n<parameter=city>\nParis\n</parameter>\nand\n</function>\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # text between params
        ('I look.\n<tool_call>\n<function=now/>\n</tool_call>', 'I look.', [('now', {})]),  # tag that closes itself
        ('I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</fun', 'I look.', [('get_weather', {'city': 'Paris'})]),  # cut end
        ('<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<tool_', '', [('get_weather', {'city': 'Paris'})]),  # cut begin
    ],
    "glm45": [
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\nand\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>', '', [('get_weather', {'city': 'Paris', 'unit': 'C'})]),  # text between
        ('<tool_call>get_weather\n<arg_key>city<arg_value>Paris</arg_value>\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # no key end
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>', '', [('get_weather', {'city': 'Paris'})]),  # no close
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par', '', [('get_weather', {'city': 'Par'})]),  # cut
        ('<tool_call>get_weather\n{"city": "Paris"}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # json args
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # json call
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # value ends
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>', '', [('get_weather', {'city': 'Paris', 'unit': 'C'})]),  # key ends
        ('So <tool_call>...</tool_call> it is.', 'So <tool_call>...</tool_call> it is.', []),  # dots
        ('<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n<arg_key>force</arg_key>\n<arg_value>True</arg_value>\n<arg_key>line</arg_key>\n<arg_value>"5"</arg_value>\n</tool_call>', '', [('edit', {'path': 'a', 'force': True, 'line': 5})]),  # bool
        ('<tool_call>now\n<tool_call>now\n</tool_call>', '', [('now', {}), ('now', {})]),  # next call
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool', '', [('get_weather', {'city': 'Paris'})]),  # cut end
        ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\nIs 1 <', '\nIs 1 <', [('get_weather', {'city': 'Paris'})]),  # no mark
    ],
    "deepseek_v3": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done', 'Done', [('now', {})]),  # text after
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # no type
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n[]\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('now', {})]),  # empty list
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n\'{"city": "Paris"}\'\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # as text in single quotes
    ],
    "deepseek_v31": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # v3 form
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # cut brace
        ('A<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>B', 'AB', [('now', {})]),  # text between
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{'city': 'Paris'}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", '', [('get_weather', {'city': 'Paris'})]),  # python
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"{\\"city\\": \\"Paris\\"}"<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # as text
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "a\nb"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'a\nb'})]),  # raw
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris",}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # comma
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '', [('get_weather', {'city': 'Paris'})]),  # fence
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>Paris<｜tool▁call▁end｜><｜tool▁calls▁end｜>', 'get_weatherParis', []),  # no json
    ],
    "kimi_k2": [
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>Done', 'Done', [('now', {})]),  # text after
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Pa', '', [('get_weather', {'city': 'Pa'})]),  # cut
        ('<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>', '', [('now', {})]),  # singular
        ('<|tool_calls_section_begin|><|tool_call_begin|>get_weather<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # name alone
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions/get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # slash
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # no number
        ('<|tool_calls_section_begin|><|tool_call_begin|>get_weather#3<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # hash
        ('<|tool_calls_section_begin|><|tool_call_begin|>toolu_01AbC<|tool_call_argument_begin|>{"path": "a", "line": 3}<|tool_call_end|><|tool_calls_section_end|>', '', [('edit', {'path': 'a', 'line': 3})]),  # uuid fits edit
        ('<|tool_calls_section_begin|><|tool_call_begin|>toolu_01AbC<|tool_call_argument_begin|>{"zip": 3}<|tool_call_end|><|tool_calls_section_end|>', 'toolu_01AbC{"zip": 3}', []),  # uuid fits none
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|tool_calls_section_end|>', '', [('now', {})]),  # no arg mark
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{'city': 'Paris'}<|tool_call_end|><|tool_calls_section_end|>", '', [('get_weather', {'city': 'Paris'})]),  # python
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>null<|tool_call_end|><|tool_calls_section_end|>', '', [('now', {})]),  # null
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>[]<|tool_call_end|><|tool_calls_section_end|>', '', [('now', {})]),  # empty list
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>\'{"city": "Paris"}\'<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # as text in single quotes
        ('<|tool_calls_section_begin|><|tool_call_begin|>function.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # another prefix
        ('<|tool_calls_section_begin|><|tool_call_begin|>tool_get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # another prefix
        ('<|tool_calls_section_begin|><|tool_call_begin|>tools.get_weather:3<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('get_weather', {'city': 'Paris'})]),  # another prefix
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', '', [('other', {'city': 'Paris'})]),  # no such tool
    ],
    "minimax_m2": [
        ('<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a</parameter>\n<parameter name="line">5</parameter>\n<parameter name="lines">[1, 2]</parameter>\n</invoke>\n</minimax:tool_call>', '', [('edit', {'path': 'a', 'line': 5, 'lines': [1, 2]})]),  # one
        ('A\n<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>\nB', 'A\nB', [('now', {})]),  # text
        ('<invoke name="now"></invoke>', '', [('now', {})]),  # bare
        ('<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call><minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>', '', [('now', {}), ('now', {})]),  # two wrappers
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>', '', [('get_weather', {'city': 'Paris'})]),  # no end
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</invoke>\n</minimax:tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # value ends
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris<parameter name="unit">C</parameter></invoke></minimax:tool_call>', '', [('get_weather', {'city': 'Paris', 'unit': 'C'})]),  # key ends
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</minimax:tool_call>', '', [('get_weather', {'city': 'Paris'})]),  # wrapper ends
        ('<minimax:tool_call>\nSo:\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', '\nSo:', [('now', {})]),  # text within
        ('<minimax:tool_call><invoke name="get_weather"><parameter name="city"><b></invoke> x</b></parameter></invoke></minimax:tool_call>', '', [('get_weather', {'city': '<b></invoke> x</b>'})]),  # markup
        ('<minimax:tool_call><invoke name="edit"><parameter name="path">a</parameter><parameter name="force">TRUE</parameter><parameter name="deep">{\'a\': 1}</parameter></invoke></minimax:tool_call>', '', [('edit', {'path': 'a', 'force': True, 'deep': {'a': 1}})]),  # types
        ("<minimax:tool_call><invoke name='get_weather'><parameter name='city'>Paris</parameter></invoke></minimax:tool_call>", '', [('get_weather', {'city': 'Paris'})]),  # single quotes
        ('<minimax:tool_call><invoke name="now"/></minimax:tool_call>', '', [('now', {})]),  # tag that closes itself
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n</minimax:tool', '', [('get_weather', {'city': 'Paris'})]),  # cut end
    ],
    "deepseek_v32": [
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path" string="true">5</｜DSML｜parameter>\n<｜DSML｜parameter name="line" string="false">5</｜DSML｜parameter>\n<｜DSML｜parameter name="deep" string="false">{"a": "x"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('edit', {'path': '5', 'line': 5, 'deep': {'a': 'x'}})]),  # one
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path" string="false">a b</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('edit', {'path': 'a b'})]),  # bad json
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="arguments" string="false">{"city": "Paris"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('get_weather', {'arguments': {'city': 'Paris'}})]),  # wrapped args
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('get_weather', {'city': 'Paris'})]),  # value ends
        ('<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>', '', [('get_weather', {'city': 'Paris'})]),  # no wrapper
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path">a</｜DSML｜parameter>\n<｜DSML｜parameter name="line">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('edit', {'path': 'a', 'line': 5})]),  # no attr
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Pa', '', [('get_weather', {'city': 'Pa'})]),  # cut
        ('I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>\nok', 'I look.\n\nok', [('now', {})]),  # text
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('now', {}), ('now', {})]),  # two
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n<｜DSML｜parameter name="line" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('edit', {'path': 'a', 'line': 5})]),  # true number
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n<｜DSML｜parameter name="deep" string="false">{"a": "x\ny",}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', '', [('edit', {'path': 'a', 'deep': {'a': 'x\ny'}})]),  # raw json
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜function_calls>', '', [('now', {})]),  # tag that closes itself
        ('<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_', '', [('get_weather', {'city': 'Paris'})]),  # cut end
    ],
    "openai": [
        ('<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>', '', [('now', {})]),  # no args
        ('<|channel|>commentary to=functions.now json<|message|>null<|call|>', '', [('now', {})]),  # null
        ('<|channel|>commentary to=functions.get_weather json<|message|>"{\\"city\\": \\"Paris\\"}"<|call|>', '', [('get_weather', {'city': 'Paris'})]),  # as text
        ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Pa', '', [('get_weather', {'city': 'Pa'})]),  # cut
        ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Paris"<|call|>', '', [('get_weather', {'city': 'Paris'})]),  # cut brace
        ("<|channel|>commentary to=functions.get_weather json<|message|>{'city': 'Paris'}<|call|>", '', [('get_weather', {'city': 'Paris'})]),  # python
        ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "\\d"}<|call|>', '', [('get_weather', {'city': '\\d'})]),  # bad escape
        ('<|channel|>commentary to=functions.get_weather json<|message|>Paris<|call|>', 'commentary to=functions.get_weather jsonParis', []),  # no json
        ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Paris",}<|call|>', '', [('get_weather', {'city': 'Paris'})]),  # trailing comma
        ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "a\nb"}<|call|>', '', [('get_weather', {'city': 'a\nb'})]),  # raw
        ('<|channel|>commentary to=functions.now <|constrain|>json<|call|>', '', [('now', {})]),  # no message
        ('<|channel|>commentary to=functions.now<|call|>', '', [('now', {})]),  # name alone
        ('<|channel|>commentary to=functions.now json<|message|>[]<|call|>', '', [('now', {})]),  # empty list
    ],
    "pythonic": [
        ('<|python_tag|>[now()]', '<|python_tag|>', [('now', {})]),  # tag
        ('[edit(path="a\x00b", text="cmd \\\n -x")]', '', [('edit', {'path': 'a\x00b', 'text': 'cmd \\\n -x'})]),  # NUL, and a line break behind a backslash
    ],
}  # fmt: skip
"""By format: what the model writes, the content, and the calls."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", KINDS)
def test_kinds_in_pieces_of_every_size(name: str):
    for text, content, calls in KINDS[name]:
        right = Answer(content, "", [Call(*call) for call in calls], "tool_calls" if calls else "stop")
        for pieces in splits(text):
            assert parse((name, "none"), pieces, TOOLS) == right, pieces
