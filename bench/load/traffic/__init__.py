"""The load: which requests are sent when, and the client processes that send them."""
