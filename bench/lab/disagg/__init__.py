"""Two deployments under load: `loads` has the loads, `__main__` compares what both sides measured."""
