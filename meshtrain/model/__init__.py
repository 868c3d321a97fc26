"""What is computed: `decoder` puts together the parts in `layers`, `attention` and `loss`; `collectives` are the hooks where devices meet."""
