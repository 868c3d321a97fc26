"""What is computed: `decoder` puts together the parts in `layers`, `attention` and `loss`; `collectives` are the places where devices meet; `hooks` says what can be replaced from outside."""
