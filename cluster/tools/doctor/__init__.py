"""`baton doctor`: finds problems on this machine or in a running cluster.

Life of a check:

1. `command` selects the checks: `node` or `running`.
2. A check yields `Finding`s. It reports a problem as a finding with a remedy and never as an exception.
3. `command` prints the findings and returns the exit code.
"""
