"""Files and batches of OpenAI's API, which one router process keeps on disk.

Life of a batch: a client uploads a file of requests (`storage`) → it makes a batch of it, and all lines are
checked (`lines`) → the requests are sent like those of clients, behind them, and each result is appended to a
file (`runner`) → the batch ends, and the files of its results are described (`storage`). A router that starts
again goes on with the batches that had not ended: it sends the requests that have no result yet.
"""
