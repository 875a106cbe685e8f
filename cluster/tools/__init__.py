"""Commands for a cluster: `status`, `top`, `doctor`, `flip`, `chat`, and `sizing` (`baton plan`)."""
