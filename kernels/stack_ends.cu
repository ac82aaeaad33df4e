// Both ends of the layers: what stands in front of the first and behind the last.

// The first norm's form: scaled = x * (1 + scale), squares [rows, 1]. One block a row of `width` values, a multiple of 4.
template <int BYTES>
__global__ void scale_rows(const u16* x, const float* scale, Code code, void* scaled, float* squares, int width) {
    __shared__ float warps[32];
    start_next();
    wait_for_last();
    float square = 0;
    for (int c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
        i64 at = static_cast<i64>(blockIdx.x) * width + c;
        uint2 four = *reinterpret_cast<const uint2*>(x + at);
        float4 v = apart(four.x, four.y), g = load4(scale + c);
        square += along(v, v);
        v = {v.x * (1.0f + g.x), v.y * (1.0f + g.y), v.z * (1.0f + g.z), v.w * (1.0f + g.w)};
        if constexpr (BYTES == 1) static_cast<u32*>(scaled)[at / 4] = encode(v, load4(code.centre + c), *code.inverse);
        else static_cast<uint2*>(scaled)[at / 4] = {pack(v.x, v.y), pack(v.z, v.w)};
    }
    for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = square;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < blockDim.x / 32; ++i) sum += warps[i];
        squares[blockIdx.x] = sum;
    }
}

// The way in: total = actions @ weight.T + bias, rounded; scaled = total * (1 + scale); squares [rows, blocks]: sums of total
// * total. A block of 256 threads has 16 outputs of all rows, at most 64, of `A` actions each.
template <int A, int BYTES>
__global__ void __launch_bounds__(256) enter(
    const float* actions, const float* weight, const float* bias, const float* scale, Code code, u16* total, void* scaled,
    float* squares, int rows, int outputs) {
    constexpr int PITCH = A + 4, CHUNKS = A / 4;  // no two rows of a read share a bank
    __shared__ float asked[64 * PITCH], held[16 * PITCH];
    start_next();
    int begin = blockIdx.x * 16, row = threadIdx.x / 4, own = threadIdx.x % 4 * 4, o = begin + own;
    for (int i = threadIdx.x; i < 16 * CHUNKS; i += 256)
        *reinterpret_cast<float4*>(held + i / CHUNKS * PITCH + i % CHUNKS * 4) = load4(weight + (begin + i / CHUNKS) * A + i % CHUNKS * 4);
    float4 sum = load4(bias + o), gain = load4(scale + o), centre = {};
    float inverse = 0;
    if constexpr (BYTES == 1) centre = load4(code.centre + o), inverse = *code.inverse;
    wait_for_last();
    for (int i = threadIdx.x; i < rows * CHUNKS; i += 256)
        *reinterpret_cast<float4*>(asked + i / CHUNKS * PITCH + i % CHUNKS * 4) = load4(actions + i * 4);
    __syncthreads();
    float square = 0;
    if (row < rows) {
#pragma unroll
        for (int k = 0; k < A; k += 4) {
            float4 x = load4(asked + row * PITCH + k);
            sum.x += along(x, load4(held + own * PITCH + k)), sum.y += along(x, load4(held + (own + 1) * PITCH + k));
            sum.z += along(x, load4(held + (own + 2) * PITCH + k)), sum.w += along(x, load4(held + (own + 3) * PITCH + k));
        }
        sum = {rounded(sum.x), rounded(sum.y), rounded(sum.z), rounded(sum.w)};
        square = along(sum, sum);
        *reinterpret_cast<uint2*>(total + row * outputs + o) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
        sum = {sum.x * (1.0f + gain.x), sum.y * (1.0f + gain.y), sum.z * (1.0f + gain.z), sum.w * (1.0f + gain.w)};
        if constexpr (BYTES == 1) static_cast<u32*>(scaled)[(row * outputs + o) / 4] = encode(sum, centre, inverse);
        else static_cast<uint2*>(scaled)[(row * outputs + o) / 4] = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
    }
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if (row < rows && threadIdx.x % 4 == 0) squares[row * gridDim.x + blockIdx.x] = square;
}

// The way out: the last norm, and its product with weight [A, WIDTH]. One block of 256 threads a row; each thread has held
// its part of the weight since before the wait.
template <int A, int WIDTH>
__global__ void __launch_bounds__(256) leave(
    const u16* total, const float* squares, const float* scale, const float* shift, const float* weight, const float* bias, float* out,
    int parts, float eps) {
    constexpr int LANES = 256 / A, COUNT = WIDTH / LANES / 4, EACH = WIDTH / 256;  // threads of an output, their chunks; values
    static_assert(EACH % 4 == 0 && LANES <= 32, "whole chunks, an output in one warp");
    __shared__ float normed[WIDTH];
    start_next();
    int o = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float4 held[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) held[i] = load4(weight + o * WIDTH + (i * LANES + lane) * 4);
    float start = bias[o];
    wait_for_last();
    float square = 0;
    for (int part = threadIdx.x % 32; part < parts; part += 32) square += squares[blockIdx.x * parts + part];
#pragma unroll
    for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    float f = rsqrtf(square / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        int at = threadIdx.x * EACH + i;
        uint2 x = *reinterpret_cast<const uint2*>(total + static_cast<i64>(blockIdx.x) * WIDTH + at);
        float4 g = load4(scale + at), m = {0, 0, 0, 0};
        if (shift) m = load4(shift + at);
        *reinterpret_cast<float4*>(normed + at) = {
            rounded(low_of(x.x) * f * (1.0f + g.x) + m.x), rounded(high_of(x.x) * f * (1.0f + g.y) + m.y),
            rounded(low_of(x.y) * f * (1.0f + g.z) + m.z), rounded(high_of(x.y) * f * (1.0f + g.w) + m.w)};
    }
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum += along(load4(normed + (i * LANES + lane) * 4), held[i]);
#pragma unroll
    for (int far = LANES / 2; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
    if (lane == 0) out[blockIdx.x * A + o] = start + sum;
}
