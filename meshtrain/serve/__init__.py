"""A small server that speaks OpenAI's protocol, for checking a model: what is trained here is tried before it goes into production.

For production export it (`python -m meshtrain.adopt export`) to a server that is made for that; see the README.
"""
