"""Builders of responses: each turns the deltas of one request into the shape of one endpoint.

1. `answers` gives a builder each delta, in order.
2. `OutputParser` (`base`) divides the text of a choice into reasoning, content and tool calls.
3. The builder collects a whole response, or returns the events of a stream at once.
"""
