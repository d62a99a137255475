// Shared memory of the FP8 forward pass beyond that of layout.cuh. V comes as [BLOCK_K][..], like K, and is transposed.
//
// From the head: SCALES_PER_TOKEN, whether keys of a head have scales of their own, and the offsets of
//
//     AT_VT               [STAGES][COLUMNS][128 bytes]: V^T, a line with the codes of a column for BLOCK_K keys
//     AT_VT_PIPE          full and empty barriers
//     AT_KEY_SCALES       for each consumer warp the scales of a tile's keys, then of their values
#pragma once
#include "sm90/layout.cuh"

constexpr int BYTES_VT = COLUMNS * CHUNK_ROW, SCALE_BYTES = 4 * BLOCK_K;

static_assert(!FP8 || (BLOCK_K % 32 == 0 && BLOCK_K <= 128), "a line of V^T has up to 128 keys, a wgmma multiplies 32");

DEVICE Pipeline<STAGES> vt_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_VT_PIPE); }
DEVICE unsigned at_vt(unsigned base, unsigned n) { return base + AT_VT + n % STAGES * BYTES_VT; }
