"""What a real cluster does to its clients' streams while its processes are killed, stalled and cut off.

Life of a run: a cluster of `baton` processes, supervised here → what each stream must say, asked once in
quiet → continuous load → faults at random moments, each followed until the worker is back → quiet: every
pool must be whole → rows. The cluster and the streams also carry the system tests of recovery.
"""
