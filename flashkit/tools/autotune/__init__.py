"""`flashkit autotune`: measure a device, find its best tiles by trial, and write both to the user's profile.

Nothing here runs inside attention(). A target is a row of a tile table: direction, dtype, head dims, mask, kernel
generation. A trial is one tile on one target: verified against the reference, then timed, interleaved with the tile
that attention uses now.

    targets    what is tuned: targets and tiles
    log        trials and measured peaks as lines of JSON; a resumed run repeats none of them
    trials     what a trial is: results against the reference, and timings
    cpu, cuda  tiles of a backend
    search     the search for one target
    command    the command: all targets within a budget of time, and the outcomes as a profile file
"""
