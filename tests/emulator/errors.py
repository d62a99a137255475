"""Errors that the interpreter returns: their names there, numbered -1, -2, ..., and what they say."""

MESSAGES = {
    "OUTSIDE": "an address outside of any allocation",
    "MISALIGNED": "a misaligned address",
    "DIVERGED": "lanes that a warp-synchronous instruction needs never converge",
    "TRAPPED": "trap",
    "UNKNOWN": "an unknown operation",
    "FULL": "too many copies or wgmma are in flight",
    "BARRIER": "a barrier with more arrivals than it expects, or one that is not initialized",
    "PARTED": "warps of a warp group that issue different wgmma",
    "UNREAD": "the CTA exits before a store has read its source in shared memory",
}
CODES = {name: -1 - i for i, name in enumerate(MESSAGES)}


class EmulationError(RuntimeError):
    """A kernel did what is undefined on a device, or never ends."""


def message(code: int) -> str:
    return list(MESSAGES.values())[-1 - code]
