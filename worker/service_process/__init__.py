"""The service process of a worker: it starts and watches the other processes, and serves routers.

`service` puts the parts together: the process tree (`tree`), the gRPC service (`grpc_service`) and what it
shows (`backend`), the metrics and the logs of attempts (`journal`). It uses neither tensors nor KV.
"""
