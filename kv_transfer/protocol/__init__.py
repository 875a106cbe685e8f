"""The protocol of a KV transfer as pure state machines: no socket, no clock, no thread.

`hello` lets two transfer processes prove themselves to each other; `frame` and `messages` are what then
passes between them, protected by checksums or by `encryption`; `credits` says how much of it may. One
transfer lives here twice: on the prefill side as a `held` prefill (READY → STREAMING → COMMITTED → RELEASED),
on the decode side as an `incoming` one (RECEIVING → COMPLETE → INJECTED). Time and messages come in as
arguments, effects go out as values, so that every order of events can be tested.
"""
