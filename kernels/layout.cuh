// How matrices stand in shared memory, and numbers in registers, up to what attention's logits become: plain C++ on top of
// hopper.cuh.

using u16 = unsigned short;
using i64 = long long;

constexpr int ROW = 128;  // bytes of a row in a panel: 64 values, the width of the hardware's widest swizzle
#define NONE __int_as_float(0xff800000)

#ifndef STAMP
#define STAMP(i)  // a build that measures notes the time here
#endif

// Descriptor of swizzled panels: one group of 8 rows is 1024 bytes from the next. Where the panels' 64 values go along the
// product's inner axis `far` is not read; where along its outer axis, it is the bytes from one panel to the next.
__device__ __forceinline__ u64 panels(u32 at, u32 far = 16) {
    return static_cast<u64>((at & 0x3ffff) >> 4) | (static_cast<u64>(far >> 4) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

// Where 16-byte chunk c of row r stands in panels of `rows` rows.
__device__ __forceinline__ u32 chunk_at(int rows, int r, int c) { return (c >> 3) * rows * ROW + r * ROW + (((c & 7) ^ (r & 7)) << 4); }

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ __forceinline__ float4 apart(u32 a, u32 b) { return {low_of(a), high_of(a), low_of(b), high_of(b)}; }
__device__ __forceinline__ float rounded(float v) { return low_of(pack(v, 0.0f)); }

__device__ __forceinline__ float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ float along(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four threads hold two neighbouring values each of every eight columns. Of four such words, of as many groups of columns,
// each thread gets a whole group of eight.
__device__ __forceinline__ uint4 gather(u32 a, u32 b, u32 c, u32 d) {
    bool odd = threadIdx.x & 1, far = threadIdx.x & 2;
    u32 near = __shfl_xor_sync(~0u, odd ? a : b, 1), other = __shfl_xor_sync(~0u, odd ? c : d, 1);
    uint2 first = odd ? uint2{near, b} : uint2{a, near}, second = odd ? uint2{other, d} : uint2{c, other};
    uint2 given = far ? first : second, kept = far ? second : first;
    uint2 got = {__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2)};
    return far ? uint4{got.x, got.y, kept.x, kept.y} : uint4{kept.x, kept.y, got.x, got.y};
}

// Four numbers as e4m3: reference.encode_fp8, whose clamp is the conversion's own.
__device__ __forceinline__ u32 encode(float4 v, float4 centre, float inverse) {
    return pack_fp8((v.x - centre.x) * inverse, (v.y - centre.y) * inverse, (v.z - centre.z) * inverse, (v.w - centre.w) * inverse);
}

struct Code {  // of what a coded matrix multiplies: [inputs], []
    const float *centre, *inverse;
};

struct Scales {  // of four outputs
    float4 factor, bias;
    __device__ float4 of(float4 v) const {
        return {v.x * factor.x + bias.x, v.y * factor.y + bias.y, v.z * factor.z + bias.z, v.w * factor.w + bias.w};
    }
};

struct Coded {  // what makes a product of coded operands that of the numbers they stand for: [outputs] each
    const float *factor, *bias;
    __device__ Scales at(int output) const { return {load4(factor + output), load4(bias + output)}; }
};

struct Slab {  // queries, keys or values: strides in values
    u16* at;
    i64 batch, head, column;
};

// Logits of a warpgroup's 64 rows of queries, in panels of `rows` rows, and KEYS columns; STEPS times 16 values of a head.
template <int KEYS, int STEPS>
__device__ __forceinline__ void multiply_keys(float (&logit)[KEYS / 2], u32 queries, int rows, u32 keys) {
    open_products();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        Mma<KEYS>::add(logit, panels(queries + i / 4 * rows * ROW + i % 4 * 32), panels(keys + i / 4 * KEYS * ROW + i % 4 * 32), i > 0);
    commit_products();
    wait_products<0>();
}

// What their columns weigh times the values, by themselves or with MORE on top of what the sums hold.
template <int DIM, int KEYS, bool MORE>
__device__ __forceinline__ void multiply_values(float (&sum)[DIM / 2], const u32 (&share)[KEYS / 4], u32 values) {
    open_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) Wide<DIM>::add(sum, share + 4 * i, panels(values + i * 2048, KEYS * ROW), MORE || i > 0);
    commit_products();
    wait_products<0>();
}

// The largest logit of each of two rows, times `scale`. :param logit: in and out, of columns of which `left` exist. :param peak: in
// and out.
template <int KEYS>
__device__ __forceinline__ void find_peaks(float (&logit)[KEYS / 2], float scale, int left, float (&peak)[2]) {
    if (left < KEYS) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;  // `left` may be negative
            if (column >= left) logit[i] = NONE;
        }
    }
    float most[2] = {NONE, NONE};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], logit[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
        peak[h] = fmaxf(peak[h], most[h] * scale);
    }
}

// What each column weighs, relative to the largest of its row. :param weight: out, a row's sum. :param share: out, packed pairs.
template <int KEYS>
__device__ __forceinline__ void make_shares(
    const float (&logit)[KEYS / 2], float scale, const float (&peak)[2], float (&weight)[2], u32 (&share)[KEYS / 4]) {
    float top[2] = {peak[0] == NONE ? 0.0f : peak[0], peak[1] == NONE ? 0.0f : peak[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
        float a = power_of_two(fmaf(logit[i], scale, -top[i / 2 % 2])), b = power_of_two(fmaf(logit[i + 1], scale, -top[i / 2 % 2]));
        weight[i / 2 % 2] += a + b;
        share[i / 2] = pack(a, b);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
        weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
    }
}

// Logits of two rows to what each column weighs, relative to the largest of them. :param logit: in, of columns of which
// `left` exist. :param share: out, packed pairs.
template <int KEYS>
__device__ __forceinline__ void weigh(
    float (&logit)[KEYS / 2], float scale, int left, float (&peak)[2], float (&weight)[2], u32 (&share)[KEYS / 4]) {
    find_peaks<KEYS>(logit, scale, left, peak);
    make_shares<KEYS>(logit, scale, peak, weight, share);
}
