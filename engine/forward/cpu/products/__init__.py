"""Products of rows with weights, in 16 bits, in blocks of fewer, and with what adapters add.

In: rows.
Out: what a layer makes of each, with the same bits in any company.
"""
