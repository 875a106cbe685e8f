"""`baton serve --ray-address`: the roles and their supervisor are actors on a Ray cluster."""
