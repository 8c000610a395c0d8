"""The OpenAI-compatible server: llama-cpp-python's own application over the streamed model.

Its packages are the extra `server`; nothing here is imported before `flashmoe serve` runs.
"""
