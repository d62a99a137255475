// Accumulator fragments of mma.sync and wgmma: four lanes share a row, and each lane holds two neighbouring columns of
// every eight.
#pragma once

// Two float32 as 16-bit elements, the first in the low half; float16 where the tensors are float32.
DEVICE unsigned pack(float low, float high) {
    unsigned r;
    if constexpr (STORAGE == BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Programmatic dependent launch (cuda_common/launch.py): the kernel starts while its predecessor still runs. After
// griddepcontrol_wait() the predecessor's results are visible; griddepcontrol_launch_dependents() lets the successor
// start.
DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Reduces over the four lanes that share a row.
template <typename F>
DEVICE float across_lanes(float x, F join) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
