"""The life of one generation, from the prompt to the last token, through failures of workers.

1. A `Generation` gets a `Job`: the token ids of a prompt and the sampling parameters.
2. `plan` (`policy.planner`) says which workers compute the prompt and which one decodes, from what workers
   hold of the request. `AttemptPair` submits the plan, and makes sure that each output token is emitted
   exactly once.
3. It puts the token into the queue of the request, and measures latency. `output` turns tokens into text.
4. If a worker fails, what its attempt held is gone, and the generation plans again from the rest.
   `FailureCount` ends that after too many failures. `admission.parked.Waits` bounds the waits for a worker,
   for retry budget, and in all.

`Generation` is a state machine without tasks. `advance` plans and submits what it needs next; the streams to
the workers tell it what happened to its attempts (`_on_event`). Nothing waits in between.

    what lacks a plan        ──▶ turn in the admission queue (room), a worker, or retry budget ──▶ plan again
    attempt failed or lost   ──▶ `AttemptPair.drop`: what is held now                          ──▶ plan again

    decode   none ─ submitted ─ reserved ─ joined (its first token came) ─ finished
    prefill  none ─ PLANNED ─ SENT ─ ANSWERED (its token came) ─ SERVED (decode has the KV)

The first time both are submitted together. If the prompt has to queue at its prefill worker, the decode is
submitted when that worker starts to compute it. So the queue holds no decode memory. After a failure
the decode reservation comes first, and the prefill is sent when it is granted. So no prompt is computed again
without KV capacity for it. An emitted token is never lost and never emitted again: a new prefill computes
prompt + output.

What waits for what, between the two workers:

    queued prefill         ──▶ blocks of its worker, which started and held prefills have
    started prefill        ──▶ nothing
    held, without a decode ──▶ a turn in the admission queue: capacity, which decodes have
    reserved decode        ──▶ its prefill
    running decode         ──▶ nothing

This forms no circle. If a reserved decode waits for a queued prefill, the worker of that prefill drops held
prefills without a decode until it can start (`engine.core.request_lives`). So decodes always end, and a held
prefill gets their capacity. If that takes longer than the hold deadline, the prefill is dropped, and computed
again under a reservation.

If log probabilities of the prompt are asked for, a prefill worker first computes the prompt without a
handover. They come from there, before the first token, and the generation plans again. So no token can
overtake them.

Workers change pools, so the worker of a prefill may be the only one left to decode, and the reverse. Prefill
and decode are then one attempt: a decode without a source, which computes the prompt itself. Only a prefill
that has its token is named as the source, because the worker holds its KV already.
"""
