"""Lets vLLM's engines take part: they send and receive KV as workers of Baton do.

Life of a request between two vLLM servers, behind a proxy that was made for vLLM's NixlConnector::

    prefill server                                      decode server
    --------------                                      -------------
    the proxy sends `do_remote_decode`, one token
    each layer of each chunk is ready: `save_kv_layer`
    the request finishes, its blocks stay
    the answer has `kv_transfer_params`      --------->  the proxy sends them with the prompt
                                                        blocks are allocated, the fetch starts
    slices leave                             --------->  slices are injected, verified
    blocks are freed                         <--- ACK -  the last position is computed, and the next tokens

This is the only package that knows vLLM. `connector`, which vLLM loads, is the only module that imports it.
`plan` decides for vLLM's scheduler, without vLLM and torch. `transfers` moves the KV, in the process with the
model.
"""
