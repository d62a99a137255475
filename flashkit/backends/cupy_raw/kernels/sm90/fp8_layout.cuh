// Shared memory of the FP8 forward pass beyond that of layout.cuh. V comes as [BLOCK_K][..], like K, and is transposed.
//
// From the head: SCALES_PER_TOKEN, whether keys of a head have scales of their own, and the offsets of
//
//     AT_VT               [STAGES][COLUMNS][128 bytes]: V^T, a line with the codes of a column for BLOCK_K keys
//     AT_VT_PIPE          full and empty barriers
//     AT_KEY_SCALES       SCALES_PER_TOKEN: [2][MMA_WARPGROUPS][3][128] floats, see load_key_scales()
#pragma once
#include "sm90/layout.cuh"

constexpr int BYTES_VT = COLUMNS * CHUNK_ROW, SCALE_BYTES = 4 * 128;

static_assert(!FP8 || (BLOCK_K % 32 == 0 && BLOCK_K <= 128), "a line of V^T has up to 128 keys, a wgmma multiplies 32");

// A warp group that transposes V: one warp would delay its scheduler's consumers, for which the others wait. Beside
// three warp groups of consumers there are no registers for it, and a warp of warp group 0 transposes.
constexpr int TRANSPOSE_WARPS = MMA_WARPGROUPS < 3 ? 4 : 1, WARPGROUPS = MMA_WARPGROUPS + (TRANSPOSE_WARPS > 1 ? 2 : 1);
constexpr int LAUNCH_REGISTERS = 65536 / (128 * WARPGROUPS) / 8 * 8;  // of a thread
static_assert(!FP8 || MMA_WARPGROUPS * CONSUMER_REGISTERS + (WARPGROUPS - MMA_WARPGROUPS) * PRODUCER_REGISTERS
                          <= WARPGROUPS * LAUNCH_REGISTERS,
              "setmaxnreg would wait for ever for registers that the launch does not get");

DEVICE Pipeline<STAGES> vt_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_VT_PIPE); }
DEVICE unsigned at_vt(unsigned base, unsigned n) { return base + AT_VT + n % STAGES * BYTES_VT; }
