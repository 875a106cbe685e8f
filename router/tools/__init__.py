"""Reasoning and tool calls in the text of a model.

A *format* is the way in which a family of models writes tool calls. Each class of `formats` is an entry of a
few lines, and has three parts:

- marks, by which the parser finds a call in text that arrives in pieces of any size. `marked` is for formats
  with marks around each call, `bare` for those without, `mistral` for lists and names behind one mark;
- a reader of `readers`, `pairs` or `kimi`, which turns one call into its name and the JSON of its arguments.
  `json_text` mends JSON that is none;
- `written`: how a call is written. `grammar` makes of it what workers enforce when `tool_choice` demands a
  call.

`parser` has what all formats share. `output` divides a text by two parsers: `reasoning` (`harmony` for models
that write messages on channels) has the text before the answer, and a format the answer. A call also ends the
reasoning.
"""
