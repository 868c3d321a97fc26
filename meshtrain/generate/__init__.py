"""A trained or imported model goes on with a text: prefill, decode, choose, stop.

    prompt ──text──► tokens ──prefill──► cache of keys and values ◄──decode──┐ a token a slot and step
                                                  │ logits ──sampling──► ids ─┴──text──► the answer

A slot holds one sequence; all slots decode together, and a free one takes the next request while the others go on
(continuous batching: Yu et al. 2022). A request's answer depends on it alone, not on what runs beside it. Read
`request` first: what is asked, and what is answered; then `opened` (a model on its mesh with its tokenizer, ends and
template), `engine` (who gets a slot when; `compiling`: ahead) and `programs` (what the devices run: `cache`,
`sampling`). `text` is the way in and out; `command` prompts and conversations.
"""
