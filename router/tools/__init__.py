"""Reasoning and tool calls in the text of a model.

A *format* is the way in which a family of models writes tool calls. Each class of `formats` has two parts:

- a parser. It takes the model's text in pieces of any size and yields content and tool calls;
- a grammar. Workers enforce it when `tool_choice` demands a call.

`parser` has what all formats share. `reasoning` divides the text before that into reasoning and content.
"""
