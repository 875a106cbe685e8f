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

And of a worker with vLLM as its engine (`--engine vllm`)::

    prefill worker                                      decode worker
    --------------                                      -------------
    prefill role ─▶ `engine` ─▶ AsyncLLM, one token     decode role ─▶ `engine`: room? ─▶ Reserved
    each layer: `save_kv_layer`              --------->  slices are injected while the prefill computes
    its token leaves; its blocks stay        --------->  the connector appends the token as an output
    `Released` from the connector            <--- ACK -  `Injected` from the connector; AsyncLLM goes on

This is the only package that knows vLLM. `connector` and `model_runner`, which vLLM loads, and
`engine_process` import it. `metadata` decides for vLLM's scheduler, without vLLM and torch. `transfers` moves
the KV, in the process with the model. `images` makes vLLM's input of pixels. `options` and `sampling`
translate to vLLM's words. `version` says which vLLM is tested.
"""
