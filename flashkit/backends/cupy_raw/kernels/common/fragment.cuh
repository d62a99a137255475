// What kernels by matrix instructions share. In an accumulator of these a row lies in four lanes, each of which has two
// neighbouring columns of every eight.
#pragma once

// Two numbers as 16-bit elements, the first in the low half; of float32 as float16.
DEVICE unsigned pack(float low, float high) {
    unsigned r;
    if constexpr (STORAGE == BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// For kernels that are launched early (launch.py), while the one before still runs: what they need is there when the first returns;
// from the second on the next one may begin, where there is room. A split call of 40 us takes 2 less so, one of Hopper's forward
// pass 1 or 2.
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

// Over the four lanes that share a row.
template <typename F>
DEVICE float across_lanes(float x, F join) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Words of the generator for keys key ... key + 3 (a multiple of 4), as two lanes see them: theirs are key + first, + 1.
DEVICE void drop_pair(float& w0, float& w1, const Params& p, int b, int h, int row, int key) {
    const Words words = philox(p.seed, key >> 2, row, h, b);
    const bool upper = key & 2;
    const unsigned word0 = upper ? words.word[2] : words.word[0], word1 = upper ? words.word[3] : words.word[1];
    w0 = word0 >= (unsigned)p.dropout_threshold ? w0 * (float)p.dropout_scale : 0;
    w1 = word1 >= (unsigned)p.dropout_threshold ? w1 * (float)p.dropout_scale : 0;
}
