"""The real engines: SGLang in this process or beside it, vLLM in its own environment."""
