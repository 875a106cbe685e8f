"""`baton plan`: how many prefill and decode workers a load needs.

Life of an answer: `speeds` says how long a prefill and a decode step of the model take, from what was
measured of one model on one GPU → `simulated` puts Poisson arrivals through the router's own policy and
simulated prefill workers (`bench.routing_sim`), and through the steps of one decode worker → `answer` looks
for the smallest pools that keep the promise, and says what decided → `command` prints it.

Left out: prefix caches and overflow, which make the true need smaller; the router's own millisecond, and what
injected KV costs decode steps, which make it larger.
"""
