"""One router as several processes on one port: `supervise` starts and watches them over `control` sockets,
`listen` shares the port, `merged_metrics` makes one page of theirs.
"""
