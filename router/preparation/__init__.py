"""From the bytes that a client sent to token ids, without stopping the event loop.

Life of a request here: bytes → `prepare`: parsed, validated, chat template, tokenizer → `Prepared`. The event
loop does this itself for a small body. A larger body goes to a child process (`preparer` → `wire` → `child`),
because JSON, pydantic, Jinja and the tokenizer all hold the GIL, so that a thread would stop the loop, too.
"""
