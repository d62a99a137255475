"""FlashAttention in ten steps for readers: `python -m examples.ladder` climbs all, `python -m
examples.ladder.step5_flash2` one. Each step is a function, runs alone, checks itself against the step before, and
prints its speed and the bytes that it moves.
"""
