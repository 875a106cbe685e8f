"""Matrix products with quantized weights."""
