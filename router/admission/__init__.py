"""Who is let in, and when: `keys` says who somebody is and how much it may use, the `gate` holds what must
wait or be turned away, `fairness` says who is next.
"""
