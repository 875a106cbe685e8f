"""An endpoint picker: tells a gateway to which router a request should go.

It implements the endpoint picker protocol of the Kubernetes Gateway API inference extension. The endpoints
are routers, because a router keeps a stream going when a worker fails. The router then chooses the workers.

Life of a request:

1. The gateway opens a stream (Envoy's ext_proc), and sends the headers and, as its mode says, the body.
2. `conversation` finds what the request belongs to: an earlier response, or the name of a conversation.
3. `Routers.choose` takes the router that made that response, or else a router of the conversation that is not
   too busy. The loads are what routers report, and what this picker sent there since then.
4. `Exchange` answers with the address, in a header and in metadata. It returns the body unchanged if the
   gateway's mode asks for that.
5. The gateway sends the request there. The response passes the stream unchanged, or does not use it.

A picker keeps nothing between requests, so several of them can stand side by side.
"""

from baton.endpoint_picker.server import PickerConfig, main
