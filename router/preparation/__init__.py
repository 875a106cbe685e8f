"""Turns the bytes of a client into token ids without blocking the event loop.

Life of a request here:

1. `Preparer` receives its bytes. It prepares a small body itself. A larger body goes to a child process,
   because JSON, pydantic, Jinja and the tokenizer hold the GIL: in a thread they would block the event loop
   too.
2. `prepare` parses and validates it, renders the chat template and tokenizes. The result is `Prepared`.
3. `child` has the `Preparer`, the process, and the messages between both. `pipe` is what all children do.
4. `grammar_checker` composes and compiles the grammar that a `demand` needs, in a child process of its own.
"""
