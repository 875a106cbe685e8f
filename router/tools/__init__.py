"""Reasoning and tool calls in the text of a model.

A *format* is the way in which a family of models writes tool calls. Each class of `formats` is an entry of a
few lines, and has three parts:

- marks, by which the parser finds a call in text that arrives in pieces of any size;
- a reader of `readers`, which turns one call into its name and the JSON of its arguments;
- `written`: how a call is written. `grammar` makes of it what workers enforce when `tool_choice` demands a
  call.

`parser` has what all formats share. `reasoning` divides the text before that into reasoning and content, and
`harmony` does so for models that write messages on channels.
"""
