"""How many workers each pool has.

`autoscaler` asks workers for their load. `scaling` and `balancer` are pure: they compute what each pool
needs, and choose for both.
"""
