// Reads float32 rows four columns at a time.
#pragma once

// Columns column ... column + 3 of token `first` and every DOWN-th after it, up to token count - 1; zeros elsewhere.
template <int DIM, int DOWN, int STEPS>
DEVICE void load_rows(float (&x)[STEPS][4], const Tensor& tensor, int b, int h, int first, int count, int column) {
    const bool aligned = DIM % 4 == 0 && (((unsigned long long)tensor.data >> 2 | tensor.batch | tensor.head |
                                           tensor.token) & 3) == 0;
    const float* source = row_at<const float>(tensor, b, h, first) + column;
    const long long step = DOWN * tensor.token;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[i][c] = 0;
        if (first + DOWN * i < count) {
            if (aligned) {
                if (column < DIM) {
                    const float4 four = *reinterpret_cast<const float4*>(source + i * step);
                    x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
                }
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (column + c < DIM) x[i][c] = source[i * step + c];
            }
        }
    }
}
