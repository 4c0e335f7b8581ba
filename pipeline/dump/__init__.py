"""Stage 2: hidden states out of the engine, in shards."""
