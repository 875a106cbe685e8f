"""GPU kernels: `cases` times them, the other modules have the cases of a kind of layer."""
