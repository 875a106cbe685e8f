"""The workers, as a router knows them.

`discovery` names addresses; the `pool` keeps a `connection` to each, leaves out what fails (`breaker`) and
gives policies their snapshot of the others (`members`); what is to be said to one waits in `outgoing`. What
a prefill worker has cached is followed by numbered reports (`cache_sequence`).
"""
