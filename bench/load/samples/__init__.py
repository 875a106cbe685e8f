"""Small generated data sets, so that nothing needs to be downloaded. `make.py` writes them."""
