"""Products of rows with weights in 16 or 32 bits, with block-quantized weights and with LoRA adapters.

In: rows.
Out: a layer's outputs, bit-identical whatever other rows are computed.
"""
