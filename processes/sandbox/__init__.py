"""Children for work that a client chose: it may take all time or memory, or crash the library that does it.

    caller ─▶ helper, which has imported what children need, and has no thread ─▶ a child, within limits

A child starts as a fork of the helper, so it starts within milliseconds and takes little memory. Caller and
child speak over a socket, in frames: a length of four bytes, little-endian, then the payload. The first frame
of a child is its pid.

`helper` is the helper and what its children do, `client` the caller that runs an event loop, `one_shot` the
one that is a thread.
"""
