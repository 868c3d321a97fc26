"""A model behind OpenAI's API, to check it with the clients that people have; for production its weights go to others (adopt export).

    client ─► gate ─► requests ─► served ─► answering ─► engine ───┐ its own thread
              key     validated   tokens    or answered            │ pieces
    client ◄─ stream or one object ◄─ answers ◄─ answering ◄───────┘ event loop

The event loop reads and writes, the engine's thread decodes, a third one makes tokens of text: none of them waits for a client.

- `meshtrain.serve.app`: the routes. `meshtrain.serve.gate`: what holds for each of them: the key, the count, the draining.
- `meshtrain.serve.fields`, `meshtrain.serve.requests`: from OpenAI's JSON to what is asked, all of it checked; `meshtrain.serve.errors`.
- `meshtrain.serve.served`: a model that is ready: tokens of text, an engine. `meshtrain.serve.answering`: from its thread to a client.
- `meshtrain.serve.answers`: OpenAI's objects of what was answered. `meshtrain.serve.stream`: and as server-sent events.
- `meshtrain.serve.answered`: answers that are kept, since they would be the same again.
- `meshtrain.serve.service`: what the routes share. `meshtrain.serve.health`: whether to send requests here. `meshtrain.serve.metrics`.
- `meshtrain.serve.listening`: the port, and how the server ends. `meshtrain.serve.running`: from the command line to there.
"""
