"""A small honest LLM server in torch: paged KV, prefix cache, continuous batching, hot swap."""
