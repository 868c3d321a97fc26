"""A model behind OpenAI's API, to check it with the clients that people have; for production its weights go to others
(adopt export).

    client ─► gate ─► requests ─► service ─► answering ─► engine ───┐ its own thread
              key     validated   tokens                           │ pieces
    client ◄─ stream or one object ◄─ answers ◄─ answering ◄───────┘ event loop

The event loop reads and writes, the engine's thread decodes, a third one makes tokens of text: none of them waits for a
client.

- `meshtrain.serve.app`: the routes, and the gate before them: the key, the count, the draining.
- `meshtrain.serve.requests`: from OpenAI's JSON to what is asked, all of it checked; `meshtrain.serve.errors`.
- `meshtrain.serve.models`: the engines behind their names, loaded and set aside.
- `meshtrain.serve.service`: which model is ready, whether to send requests here, and the values of
  `meshtrain.serve.metrics`.
- `meshtrain.serve.answering`: from the engine's thread to a client. `meshtrain.serve.answers`: OpenAI's objects, whole
  or streamed.
- `meshtrain.serve.listening`: from the command line to the port, and how the server ends.
"""
