"""Lossless speculative serving of Hugging Face causal language models.

The sub-packages are links to the folders of the repository's root. A wheel has folders in their place.
"""
