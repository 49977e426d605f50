"""This engine beside vLLM, llama.cpp and transformers, in turns. In: prompts. Out: speeds and answers of each."""
