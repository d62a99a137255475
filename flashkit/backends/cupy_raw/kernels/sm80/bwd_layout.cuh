// Constants of the backward kernel: how its warps share the products, schedules, pitches.
#pragma once
#include "sm80/layout.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int S_TILES = BLOCK_Q / (16 * WARPS_S), S_KEYS = BLOCK_K * WARPS_S / WARPS / 8;
constexpr int KV_TILES = BLOCK_K / (16 * WARPS_KV), K_COLUMNS = padded(HEAD_DIM) * WARPS_KV / WARPS / 8;
constexpr int V_COLUMNS = padded(HEAD_DIM_V) * WARPS_KV / WARPS / 8;
constexpr int Q_TILES = BLOCK_Q / (16 * WARPS_Q), Q_COLUMNS = padded(HEAD_DIM) * WARPS_Q / WARPS / 8;

// COPY_DURING_MMA: where registers leave room, the copies of the next tile are interleaved with the first two products.
// DQ_FIRST: dQ is computed before dV, so that two products hide its additions instead of one.
constexpr bool COPY_DURING_MMA = !IS_FLOAT32 && HEAD_DIM > 64;
constexpr bool DQ_FIRST = !IS_FLOAT32 && (HEAD_DIM <= 64 || HEAD_DIM > 128);
// All of dQ is added during the product of dV: the CTA that waits for this tile of dQ waits less.
constexpr bool DQ_WITH_DV = DQ_FIRST && HAS_MASK && HEAD_DIM > 128;
// Puts the coordinates of the work tile into uniform registers, and takes one base address for all shared memory.
constexpr bool UNIFORM_REGISTERS = HAS_MASK || HEAD_DIM <= 128;
constexpr bool USE_TILE_LIST = HAS_MASK || IS_FLOAT32;  // float32: without the list other values spill
static_assert(S_KEYS % 2 == 0 && K_COLUMNS % 2 == 0 && V_COLUMNS % 2 == 0 && Q_COLUMNS % 2 == 0,
              "ldmatrix_x4 loads two operands");

constexpr int SIZE = sizeof(storage), PITCH = pitch(HEAD_DIM), PITCH_V = pitch(HEAD_DIM_V);
constexpr int PITCH_S = BLOCK_K * SIZE + 16;

// A masked pair has P = 0 and dS = 0, but 0 times inf or NaN is NaN: non-finite gradients are recomputed
// (bwd_nonfinite.cuh).
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;
