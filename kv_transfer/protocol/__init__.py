"""The protocol of a KV transfer as pure state machines: no socket, no clock, no thread.

With `hello` two transfer processes prove to each other that they know the secret. Then they exchange `frame`s
with `messages` or KV, protected by checksums or by `encryption`. `credits` bound the frames under way.

Each side of a transfer has a state machine. The prefill side holds a prefill (`held`: READY → STREAMING →
COMMITTED → RELEASED). The decode side receives a transfer (`incoming`: RECEIVING → COMPLETE → INJECTED).
Times and messages are arguments, and effects are returned, so tests can try every order of events.
"""
