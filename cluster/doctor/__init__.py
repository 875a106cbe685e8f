"""`baton doctor`: what is wrong, or will be, on this node, between two nodes, or in a running cluster.

Each check (`node`, `network`, `running`) is a function that yields `Finding`s; it never raises for what it
looks for. A finding that is not good names its remedy. `command` runs the checks, prints them and makes the
exit code.
"""
