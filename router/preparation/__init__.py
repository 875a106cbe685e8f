"""Turns the bytes of a client into token ids without blocking the event loop.

Life of a request here:

1. `Preparer` receives its bytes. A thread prepares a small body: most of its time is the tokenizer's, which
   computes without the GIL. A larger body goes to a child process, because JSON, pydantic and Jinja hold the
   GIL, and their thread would block the event loop.
2. `Preparation` parses and validates it, renders the chat template and tokenizes. The result is `Prepared`.
3. `child` has the `Preparer`, the process, and the messages between both.
4. A child process of its own composes and compiles the grammar that a `demand` needs.
"""
