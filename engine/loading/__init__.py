"""Models, tokenizers and tables from disk or package index.

In: a name or a folder.
Out: a loaded model, or one line that says why not.
"""
