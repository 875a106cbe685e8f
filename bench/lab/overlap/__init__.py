"""The cost of a handover: `__main__` writes the rows, `streams` submits requests and reads traces."""
