"""How a router on Kubernetes finds its workers: EndpointSlices of Services, listed and watched."""
