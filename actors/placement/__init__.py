"""Where processes run: Ray, cores, and which ranks make a group.

In: options.
Out: places.
"""
