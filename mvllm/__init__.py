"""mvllm: an LLM inference engine in pure Python."""
