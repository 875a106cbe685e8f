"""Compares disaggregated Baton with colocated engines under load, by the same client.

Life of a run:

1. `sides` names what is measured: Baton with a prefill and a decode pool, Baton colocated, and OpenAI
   endpoints. Sides of Baton start one after another, each with all GPUs.
2. `loads` lists the loads. Each is measured at several rates, while the side stays up.
3. `baton bench` measures each of them in a child process. `results` makes rows of what it found, and a page
   of all results.

`pairs` compares two commands, which it starts in turns with several seeds.
"""
