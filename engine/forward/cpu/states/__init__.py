"""Layers of hybrid models that keep a state: which functions they call, and compiled code in the places of these.

In: a layer's rows of all requests.
Out: what the layer's rule makes of each, along its own path.
"""
