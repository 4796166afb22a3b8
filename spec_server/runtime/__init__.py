"""A thin, typed wrapper over llama.cpp. Knows nothing of slots, drafters or files."""
