"""All-reduce, written out: which device sends what to whom, a message at a time. `psum` leaves that to XLA and NCCL.

    S bytes on n devices    steps                      the busiest sends         has a reduce-scatter and an all-gather
    ring                    2 (n-1)                    2 S (n-1)/n               yes
    two-way ring            2 floor(n/2)               2 S (n-1)/n, both ways    yes
    halving-doubling        2 log2 n                   2 S (n-1)/n               where n is a power of two
    double tree             at most 4 (p + log2 n)     2 S, in p pieces          no
    hierarchical            those of two rings         2 S (n-1)/n               the ring's

**On average over the devices all of them send 2 S (n-1)/n bytes**: each number is added n - 1 times, for which n - 1 messages must bring
it, and n - 1 must take the sum to the others. What differs is who sends, how far, and in how many steps. A step costs its latency: where
arrays are small few steps win, where they are large the bytes of the busiest device do.

Each program works on the devices of one mesh axis, or of several as if they were one, and is called inside `shard_map`. The sum of a
number is made on one device and copied to the others, so that all have the same bits; algorithms add in different orders, so that
between two of them the last bits differ.

- `chunks`: an array cut into equal parts; who a device sends to.
- `ring`, `two_way_ring`, `halving_doubling`, `double_tree`, `hierarchical`: a program each, with its drawing.
- `trees`: the double tree's edges and steps.
- `chosen`: the program that `parallel.reduce.algorithm` names.
"""
