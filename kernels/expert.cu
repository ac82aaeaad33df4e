// The action expert's layer on Hopper, five launches. Compiled at load by expert_layer.py, which puts the structs Mma (one
// matrix instruction per width) in front; no header is needed.
//
// Every kernel is started while the one in front still runs: it brings its weights, which nobody writes, into shared
// memory, and only then waits for what the one in front computed. Where the inputs of a product are cut into slices, the
// blocks of one cluster add their sums through each other's shared memory in a fixed order: no second kernel, the same
// bits in each run. A norm is no kernel either. Its producer leaves x * (1 + scale) and, per row, sums of x * x; its
// consumer multiplies its product by 1 / rms(x) and adds shift @ W, which was made at load.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int ROW = 128;  // bytes of a row in a panel: 64 values, the width of the hardware's widest swizzle

__device__ __forceinline__ u32 shared_at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// What ordinary writes left in shared memory, before the matrix unit reads it.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 in_block(u32 at, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

__device__ __forceinline__ float4 read4(u32 at) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint4 read16(u32 at) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float2 read2(u32 at) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 pack(float low, float high) {  // two bfloat16, rounded to nearest even
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Matrix descriptor of swizzled panels. Values that follow one another along the product's inner axis: one group of 8
// rows is 1024 bytes from the next, `far` is not read. Along the outer axis: `far` bytes from one panel to the next.
__device__ __forceinline__ u64 panels(u32 at, u32 far = 16) {
    return static_cast<u64>((at & 0x3ffff) >> 4) | (static_cast<u64>(far >> 4) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

// Where 16-byte chunk c of row r stands in panels of `rows` rows.
__device__ __forceinline__ u32 chunk_at(int rows, int r, int c) {
    return (c >> 3) * rows * ROW + r * ROW + (((c & 7) ^ (r & 7)) << 4);
}

// Ask for this block's part of a later kernel's weights to be brought into the second-level cache.
__device__ __forceinline__ void ask_ahead(const char* from, i64 bytes) {
    constexpr int SIZE = 4096;
    for (i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * SIZE; at < bytes; at += static_cast<i64>(gridDim.x) * blockDim.x * SIZE) {
        i64 size = bytes - at < SIZE ? bytes - at : SIZE;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(static_cast<u32>(size)) : "memory");
    }
}

// --- products of at most 64 rows ---

// One cluster of CL blocks computes N outputs of all rows; each block K of the inputs.
template <int N, int K, int CL, int GROUPS, int ROWS>
struct Product {
    static constexpr int THREADS = 128 * GROUPS, PANELS = K / 64, STAGES = PANELS >= 4 ? 4 : PANELS;
    static constexpr int PITCH = (N + 23) / 32 * 32 + 8;  // floats; no two rows of a store share a bank
    static constexpr int W_BYTES = PANELS * N * ROW;
    static constexpr int SUMS = ROWS * PITCH * 4, X_PANELS = PANELS * ROWS * ROW + (64 - ROWS) * ROW;
    static constexpr int X_BYTES = X_PANELS > SUMS ? X_PANELS : (SUMS + 1023) / 1024 * 1024;
    static constexpr int BYTES = 1024 + W_BYTES + X_BYTES + 64 * 4;  // and room for marks where they are used

    u32 w, x;            // the weight's panels; x's panels, later the sums
    float *factor, *marks;
    int rank, tile, first, last;  // of the cluster; rows that this block ends

    __device__ Product(char* chip, int rows) {
        u32 base = shared_at(chip), up = (1024 - base % 1024) % 1024;
        w = base + up;
        x = w + W_BYTES;
        factor = reinterpret_cast<float*>(chip + up + W_BYTES + X_BYTES);
        marks = factor + 64;
        rank = blockIdx.x % CL;
        tile = blockIdx.x / CL;
        int each = (rows + CL - 1) / CL;
        first = rank * each;
        last = min(first + each, rows);
    }

    template <class Place>
    __device__ void bring_weights(const u16* weight, Place place) {
        for (int i = threadIdx.x; i < N * (K / 8); i += THREADS) {
            int n = i / (K / 8), c = i % (K / 8);
            copy16(w + chunk_at(N, n, c), weight + static_cast<i64>(place(n)) * (K * CL) + rank * K + c * 8);
        }
        commit_copies();
    }

    template <int STAGE>
    __device__ void bring_rows(const u16* from, int rows) {
        constexpr int CHUNKS = PANELS / STAGES * 8;
        for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
            int r = i / CHUNKS, c = i % CHUNKS + STAGE * CHUNKS;
            copy16(x + chunk_at(ROWS, r, c), from + static_cast<i64>(r) * (K * CL) + rank * K + c * 8);
        }
        commit_copies();
    }

    template <int STAGE>
    __device__ void multiply(float (&sum)[N / GROUPS / 2]) {
        wait_copies<STAGES - 1 - STAGE>();
        publish();
        __syncthreads();
        open_products();
        u32 mine = (threadIdx.x / 128) * (N / GROUPS) * ROW;
#pragma unroll
        for (int p = STAGE * (PANELS / STAGES); p < (STAGE + 1) * (PANELS / STAGES); ++p)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                Mma<N / GROUPS>::add(sum, panels(x + p * ROWS * ROW + k * 32), panels(w + p * N * ROW + mine + k * 32), p + k > 0);
        commit_products();
    }

    // The cluster's sums of all rows, each block's in its own shared memory; what stands before was asked for before.
    __device__ void run(const u16* from, int rows) {
        arrive();  // all blocks live before any reads from another
        bring_rows<0>(from, rows);
        if constexpr (STAGES > 1) bring_rows<1>(from, rows);
        if constexpr (STAGES > 2) { bring_rows<2>(from, rows); bring_rows<3>(from, rows); }
        float sum[N / GROUPS / 2];
        multiply<0>(sum);
        if constexpr (STAGES > 1) multiply<1>(sum);
        if constexpr (STAGES > 2) { multiply<2>(sum); multiply<3>(sum); }
        wait_products();
        meet();
        __syncthreads();  // nobody reads x any more: the sums take its place
        int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane / 4;
        int c = threadIdx.x / 128 * (N / GROUPS) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / GROUPS / 8; ++j) {
            u32 at = x + (r * PITCH + c + j * 8) * 4;
            if (r < ROWS) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(sum[4 * j]), "f"(sum[4 * j + 1]) : "memory");
            if (r + 8 < ROWS)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * PITCH * 4), "f"(sum[4 * j + 2]), "f"(sum[4 * j + 3]) : "memory");
        }
        arrive();
        meet();
    }

    // Four outputs of one row, all inputs.
    __device__ float4 total(int r, int c) {
        float4 part[CL];
#pragma unroll
        for (int i = 0; i < CL; ++i) part[i] = read4(in_block(x + (r * PITCH + c) * 4, i));
        float4 sum = part[0];
#pragma unroll
        for (int i = 1; i < CL; ++i) sum.x += part[i].x, sum.y += part[i].y, sum.z += part[i].z, sum.w += part[i].w;
        return sum;
    }

    // 1 / rms of this block's rows.
    __device__ void bring_factors(const float* squares, int parts, float eps) {
        int r = first + threadIdx.x;
        if (r < last) {
            float sum = 0;
#pragma unroll 8
            for (int i = 0; i < parts; ++i) sum += squares[r * parts + i];
            factor[threadIdx.x] = rsqrtf(sum / (K * CL) + eps);
        }
    }

    __device__ void leave() {  // a block's shared memory must outlive its readers
        arrive();
        meet();
    }
};

struct Slab {  // keys or values: strides in values
    u16* at;
    i64 batch, head, column;
};

// QKV: x [rows, K * CL] before its factor; queries [B, heads, tokens, 2 * HALF]; K and V into their slab.
template <int N, int K, int CL, int GROUPS, int ROWS, int HALF>
__global__ void __launch_bounds__(128 * GROUPS) project_rotate(
    const u16* x, const u16* weight, const float* squares, const float* shift, const float* cos, const float* sin, u16* query,
    Slab keys, Slab values, const i64* start, const char* ahead, i64 ahead_bytes, int rows, int tokens, int heads,
    int kv_heads, int columns, int parts, float eps) {
    extern __shared__ char chip[];
    start_next();
    Product<N, K, CL, GROUPS, ROWS> p(chip, rows);
    int pairs = (heads + 2 * kv_heads) * HALF;
    p.bring_weights(weight, [&](int n) {
        int pair = p.tile * (N / 2) + n / 2;
        return pair < pairs ? pair / HALF * 2 * HALF + n % 2 * HALF + pair % HALF : 0;
    });
    ask_ahead(ahead, ahead_bytes);
    wait_for_last();
    p.bring_factors(squares, parts, eps);
    p.run(x, rows);
    for (int i = threadIdx.x; i < (p.last - p.first) * (N / 4); i += 128 * GROUPS) {
        int r = p.first + i / (N / 4), c = i % (N / 4) * 4, pair = p.tile * (N / 2) + c / 2, head = pair / HALF, at = pair % HALF;
        float4 v = p.total(r, c);
        if (pair >= pairs) continue;
        float f = p.factor[r - p.first];
        float2 low = {v.x * f, v.z * f}, high = {v.y * f, v.w * f};
        if (shift) {
            float2 a = *reinterpret_cast<const float2*>(shift + head * 2 * HALF + at), b = *reinterpret_cast<const float2*>(shift + head * 2 * HALF + HALF + at);
            low.x += a.x, low.y += a.y, high.x += b.x, high.y += b.y;
        }
        int batch = r / tokens, token = r % tokens;
        if (head < heads + kv_heads) {
            float2 c2 = *reinterpret_cast<const float2*>(cos + r * HALF + at), s2 = *reinterpret_cast<const float2*>(sin + r * HALF + at);
            float2 a = low, b = high;
            low = {a.x * c2.x - b.x * s2.x, a.y * c2.y - b.y * s2.y};
            high = {b.x * c2.x + a.x * s2.x, b.y * c2.y + a.y * s2.y};
        }
        u16* to;
        if (head < heads) {
            to = query + (static_cast<i64>(batch * heads + head) * tokens + token) * 2 * HALF + at;
        } else {
            i64 column = start[batch] + token;
            if (column < 0 || column >= columns) continue;
            const Slab& slab = head < heads + kv_heads ? keys : values;
            int own = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
            to = slab.at + batch * slab.batch + own * slab.head + column * slab.column + at;
        }
        *reinterpret_cast<u32*>(to) = pack(low.x, low.y);
        *reinterpret_cast<u32*>(to + HALF) = pack(high.x, high.y);
    }
    p.leave();
}

__device__ __forceinline__ float gelu(float g) {  // tanh form: g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
    float u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return g / (1.0f + power_of_two(-2.8853900817779268f * u));
}

// Gate and up projection and gated GELU: out [rows, outputs].
template <int N, int K, int CL, int GROUPS, int ROWS>
__global__ void __launch_bounds__(128 * GROUPS) gated_up(
    const u16* x, const u16* weight, const float* squares, const float* shift, u16* out, const char* ahead, i64 ahead_bytes,
    int rows, int outputs, int parts, float eps) {
    extern __shared__ char chip[];
    start_next();
    Product<N, K, CL, GROUPS, ROWS> p(chip, rows);
    p.bring_weights(weight, [&](int n) {
        int o = p.tile * (N / 2) + n / 2;
        return o < outputs ? n % 2 * outputs + o : 0;
    });
    ask_ahead(ahead, ahead_bytes);
    wait_for_last();
    p.bring_factors(squares, parts, eps);
    p.run(x, rows);
    for (int i = threadIdx.x; i < (p.last - p.first) * (N / 4); i += 128 * GROUPS) {
        int r = p.first + i / (N / 4), c = i % (N / 4) * 4, o = p.tile * (N / 2) + c / 2;
        float4 v = p.total(r, c);
        if (o >= outputs) continue;
        float f = p.factor[r - p.first];
        float2 gate = {v.x * f, v.z * f}, up = {v.y * f, v.w * f};
        if (shift) {
            float2 a = *reinterpret_cast<const float2*>(shift + o), b = *reinterpret_cast<const float2*>(shift + outputs + o);
            gate.x += a.x, gate.y += a.y, up.x += b.x, up.y += b.y;
        }
        *reinterpret_cast<u32*>(out + static_cast<i64>(r) * outputs + o) = pack(gelu(gate.x) * up.x, gelu(gate.y) * up.y);
    }
    p.leave();
}

__device__ __forceinline__ float rounded(float v) { return low_of(pack(v, 0.0f)); }

// total = stream + gate * (x @ weight.T); scaled = total * (1 + scale); squares [rows, tiles]: sums of total * total.
template <int N, int K, int CL, int GROUPS, int ROWS>
__global__ void __launch_bounds__(128 * GROUPS) add_product(
    const u16* x, const u16* weight, const u16* stream, const float* gate, const float* scale, u16* total, u16* scaled,
    float* squares, const char* ahead, i64 ahead_bytes, int rows, int outputs) {
    extern __shared__ char chip[];
    start_next();
    Product<N, K, CL, GROUPS, ROWS> p(chip, rows);
    p.bring_weights(weight, [&](int n) {
        int o = p.tile * N + n;
        return o < outputs ? o : 0;
    });
    ask_ahead(ahead, ahead_bytes);
    wait_for_last();
    p.run(x, rows);
    for (int i = threadIdx.x; i < (p.last - p.first) * (N / 4); i += 128 * GROUPS) {
        int r = p.first + i / (N / 4), c = i % (N / 4) * 4, o = p.tile * N + c;
        float4 v = p.total(r, c);
        float square = 0;
        if (o < outputs) {
            i64 at = static_cast<i64>(r) * outputs + o;
            uint2 before = *reinterpret_cast<const uint2*>(stream + at);
            float4 g = *reinterpret_cast<const float4*>(scale + o);
            v = {rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w)};
            if (gate) {  // rounded where the reference rounds: the product, the gate, their product
                float4 open = *reinterpret_cast<const float4*>(gate + o);
                v = {rounded(rounded(open.x) * v.x), rounded(rounded(open.y) * v.y), rounded(rounded(open.z) * v.z), rounded(rounded(open.w) * v.w)};
            }
            uint2 after = {pack(low_of(before.x) + v.x, high_of(before.x) + v.y), pack(low_of(before.y) + v.z, high_of(before.y) + v.w)};
            float a = low_of(after.x), b = high_of(after.x), c4 = low_of(after.y), d = high_of(after.y);
            square = a * a + b * b + c4 * c4 + d * d;
            *reinterpret_cast<uint2*>(total + at) = after;
            *reinterpret_cast<uint2*>(scaled + at) = {pack(a * (1.0f + g.x), b * (1.0f + g.y)), pack(c4 * (1.0f + g.z), d * (1.0f + g.w))};
        }
        p.marks[i] = square;
    }
    __syncthreads();
    int r = p.first + threadIdx.x;
    if (r < p.last) {
        float sum = 0;
        for (int i = 0; i < N / 4; ++i) sum += p.marks[threadIdx.x * (N / 4) + i];
        squares[r * (gridDim.x / CL) + p.tile] = sum;
    }
    p.leave();
}

// The first norm's form: scaled = x * (1 + scale), squares [rows, 1]. One block a row of `width` values.
extern "C" __global__ void scale_rows(const u16* x, const float* scale, u16* scaled, float* squares, int width) {
    __shared__ float warps[32];
    start_next();
    wait_for_last();
    float square = 0;
    for (int c = threadIdx.x * 2; c < width; c += blockDim.x * 2) {
        u32 both = *reinterpret_cast<const u32*>(x + static_cast<i64>(blockIdx.x) * width + c);
        float a = low_of(both), b = high_of(both);
        square += a * a + b * b;
        *reinterpret_cast<u32*>(scaled + static_cast<i64>(blockIdx.x) * width + c) = pack(a * (1.0f + scale[c]), b * (1.0f + scale[c + 1]));
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

// --- attention ---

// 64 packed queries (row r is query r % queries of head r / queries) over CL * KEYS columns, KEYS of them a block, heads of
// 256. Columns below lengths - queries were written long ago: they are brought before the wait.
template <int CL, int KEYS>
__global__ void __launch_bounds__(128) attend(
    const u16* query, Slab keys, Slab values, const i64* lengths, u16* out, const char* ahead, i64 ahead_bytes, int queries,
    int group, int kv_heads, int columns, float scale) {
    constexpr int DIM = 256, CHUNKS = DIM / 8, Q_BYTES = 64 * DIM * 2, K_BYTES = KEYS * DIM * 2, OUT_PITCH = DIM * 2 + 16;
    constexpr int EACH = 64 / CL;
    extern __shared__ char chip[];
    start_next();
    u32 base = shared_at(chip), q = base + (1024 - base % 1024) % 1024, k = q + Q_BYTES, v = k + K_BYTES, notes = v + K_BYTES;
    int rank = blockIdx.x % CL, tile = blockIdx.x / CL, pair = blockIdx.y, batch = pair / kv_heads, kv = pair % kv_heads;
    int packed = group * queries, begin = rank * KEYS;
    int length = min(columns, static_cast<int>(lengths[batch])), end = min(begin + KEYS, length);
    int old = max(begin, min(end, length - queries));
    const u16* key = keys.at + batch * keys.batch + kv * keys.head;
    const u16* value = values.at + batch * values.batch + kv * values.head;
    auto bring = [&](int from, int to) {
        for (int i = threadIdx.x; i < (to - from) * CHUNKS; i += 128) {
            int column = from + i / CHUNKS, c = i % CHUNKS;
            copy16(k + chunk_at(KEYS, column - begin, c), key + column * keys.column + c * 8);
        }
    };
    auto bring_values = [&](int from, int to) {
        for (int i = threadIdx.x; i < (to - from) * CHUNKS; i += 128) {
            int column = from + i / CHUNKS, c = i % CHUNKS;
            copy16(v + chunk_at(KEYS, column - begin, c), value + column * values.column + c * 8);
        }
    };
    bring(begin, old);
    bring_values(begin, old);
    commit_copies();
    int empty = max(begin, end) - begin;  // weight 0 times what stands there would be NaN
    for (int i = threadIdx.x; i < (KEYS - empty) * CHUNKS; i += 128)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + chunk_at(KEYS, empty + i / CHUNKS, i % CHUNKS)), "r"(0) : "memory");
    ask_ahead(ahead, ahead_bytes);
    arrive();
    wait_for_last();
    int rows = min(64, packed - tile * 64);
    const u16* asked = query + (static_cast<i64>(pair) * packed + tile * 64) * DIM;
    for (int i = threadIdx.x; i < rows * CHUNKS; i += 128) copy16(q + chunk_at(64, i / CHUNKS, i % CHUNKS), asked + i * 8);
    bring(old, end);
    commit_copies();
    bring_values(old, end);
    commit_copies();
    wait_copies<1>();
    publish();
    __syncthreads();

    float logit[KEYS / 2];
    open_products();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i)
        Mma<KEYS>::add(logit, panels(q + i / 4 * 64 * ROW + i % 4 * 32), panels(k + i / 4 * KEYS * ROW + i % 4 * 32), i > 0);
    commit_products();
    wait_products();
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float peak[2] = {-INFINITY_, -INFINITY_}, weight[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        int column = begin + i / 4 * 8 + lane % 4 * 2 + i % 2;
        logit[i] = column < end ? logit[i] * scale : -INFINITY_;
        peak[i / 2 % 2] = fmaxf(peak[i / 2 % 2], logit[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
        peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        float top = peak[i / 2 % 2];
        logit[i] = power_of_two(logit[i] - (top == -INFINITY_ ? 0.0f : top));
        weight[i / 2 % 2] += logit[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
        weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
    }
    u32 share[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) share[i] = pack(logit[2 * i], logit[2 * i + 1]);
    wait_copies<0>();
    publish();
    __syncthreads();
    float sum[DIM / 2];
    open_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) Wide::add(sum, share + 4 * i, panels(v + i * 2048, KEYS * ROW), i > 0);
    commit_products();
    wait_products();
    meet();
    // This block's part, where queries and keys stood: rounded, since CL of them are added its error is below the result's.
#pragma unroll
    for (int i = 0; i < DIM / 2; i += 2) {
        u32 at = q + (row + i / 2 % 2 * 8) * OUT_PITCH + (i / 4 * 8 + lane % 4 * 2) * 2;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(pack(sum[i], sum[i + 1])) : "memory");
    }
    if (lane % 4 == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(notes + (row + h * 8) * 8), "f"(peak[h]), "f"(weight[h]) : "memory");
    }
    arrive();
    meet();
    for (int i = threadIdx.x; i < EACH * CHUNKS; i += 128) {
        int r = rank * EACH + i / CHUNKS, c = i % CHUNKS, place = tile * 64 + r;
        float2 note[CL];
        uint4 part[CL];
#pragma unroll
        for (int b = 0; b < CL; ++b) {
            note[b] = read2(in_block(notes + r * 8, b));
            part[b] = read16(in_block(q + r * OUT_PITCH + c * 16, b));
        }
        float top = note[0].x, all = 0, mix[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int b = 1; b < CL; ++b) top = fmaxf(top, note[b].x);
#pragma unroll
        for (int b = 0; b < CL; ++b) {
            float f = power_of_two(note[b].x - top);
            all += f * note[b].y;
            mix[0] += f * low_of(part[b].x), mix[1] += f * high_of(part[b].x), mix[2] += f * low_of(part[b].y), mix[3] += f * high_of(part[b].y);
            mix[4] += f * low_of(part[b].z), mix[5] += f * high_of(part[b].z), mix[6] += f * low_of(part[b].w), mix[7] += f * high_of(part[b].w);
        }
        if (place >= packed) continue;
        float f = 1.0f / all;
        int head = kv * group + place / queries;
        u16* to = out + (static_cast<i64>(batch * queries + place % queries) * (kv_heads * group) + head) * DIM + c * 8;
        *reinterpret_cast<uint4*>(to) = {pack(mix[0] * f, mix[1] * f), pack(mix[2] * f, mix[3] * f), pack(mix[4] * f, mix[5] * f), pack(mix[6] * f, mix[7] * f)};
    }
    arrive();
    meet();
}
