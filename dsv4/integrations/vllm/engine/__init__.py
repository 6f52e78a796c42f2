"""This package's model under vLLM's engine: scheduler, block tables, sampler and API server.

- ``model``: the class that vLLM's registry builds.
- ``refusals``: settings of vLLM that it does not support, each with a sentence.
- ``options``: what ``--additional-config`` says of the model.
- ``specs``: pages of each layer, as vLLM's KV cache specs and groups.
- ``rows``: one row per running request, for what a request has once: compressor state and tables.
- ``pages``: the modules that vLLM binds its memory to, and the metadata of a step.
- ``cache``: a ``PagedCache`` over that memory.
"""
