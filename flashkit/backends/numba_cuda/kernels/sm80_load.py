# parts: tensor
# What both passes by mma.sync begin with: tiles on their way to shared memory. THREADS: of a block.

product = mma(STORAGE)


@device
def load_tile(target, tensor, b, h, first, count, rows, dim):
    """Rows first ... of a head to shared memory, beside what the warps do; those at or past `count`, and columns past
    the head dim up to what is multiplied, become zeros.
    """
    units, source = padded_units(dim), row_address(tensor, I(b), I(h), I(first))
    for i in range(thread(), rows * units, THREADS):
        row, unit = i // units, i % units
        there = first + row < count and 8 * unit < dim
        copy_unit(
            target + unit // 8 * rows * CHUNK_ROW + swizzled(row, unit % 8),
            source + (row * tensor.token * ITEM + UNIT * unit if there else 0),
            16 if there else 0,
        )


@device
def padded_units(dim):
    return (dim + 15) // 16 * 2
