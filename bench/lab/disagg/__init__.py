"""Compares two deployments under load, by the same client: disaggregated Baton and another one."""
