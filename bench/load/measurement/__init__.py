"""From the records of a run to numbers: percentiles, steady state, objectives, views of client and server."""
