"""State layers: Mamba-2 and the gated delta rule."""
