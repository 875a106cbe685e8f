"""One engine: on a CPU, on a GPU, over several devices."""
