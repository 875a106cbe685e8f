"""What a handover costs: `python -m bench.overlap`.

`__main__` starts a prefill and a decode worker, submits to both as a router does (`streams`), reads the
moments inside from the workers' traces (`trace`), and reports; `picture` draws one handover out of these.
"""
