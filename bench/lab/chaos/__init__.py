"""What a cluster does to its clients' streams while its processes are killed, stopped, cut off and flipped.

Life of a run:

1. Start a cluster of `baton` processes (`harness.cluster`). It restarts every process that ends.
2. Ask each case once while nothing is wrong: the right answers (`harness.streams`).
3. Send continuous load of them. Cause faults at random moments, and follow each until the worker is back
   (`faults`).
4. Stop the load. Every pool must be whole. Write the rows.
"""
