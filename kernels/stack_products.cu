// The products of a layer with at most 64 rows: one cluster of CL blocks computes N outputs of all rows, each block with K
// of the inputs. The blocks send one another their sums, rounded (the way between blocks is what a product waits for longest),
// each ends some of the rows and adds them in a fixed order: no second kernel, the same bits in each run. A norm is no kernel
// either. Its producer leaves x * (1 + scale) and, per row, sums of x * x; its consumer multiplies its product by 1 / rms(x)
// and adds shift @ W, which was made at load.
//
// Shared memory is what keeps a kernel from being there early, beside the one in front. So only HELD panels of the weight may
// stand in it: the others are asked into the L2 cache, and each takes the place of one that was multiplied. A block that had
// to wait for room multiplies what is there while the rest comes: a barrier a stage.

template <int N, int K, int CL, int GROUPS, int ROWS, int HELD>
struct Product {
    static constexpr int THREADS = 128 * GROUPS, PANELS = K / 64, EACH = (ROWS + CL - 1) / CL;
    static constexpr int STAGES = PANELS >= 4 && HELD == PANELS ? 4 : PANELS, BARRIERS = (STAGES + 2) / 2 * 16;  // stages; bytes
    static constexpr int PITCH = N + 8;  // values of a row of sums; the rows of a store begin in other banks
    static constexpr int EVERY = PANELS / STAGES, SLOT = EACH * PITCH * 2, W_BYTES = HELD * N * ROW;
    static constexpr int X_BYTES = PANELS * ROWS * ROW + (64 - ROWS) * ROW;  // 64 rows are read
    static_assert(PANELS % STAGES == 0, "a stage is whole panels");
    static_assert(HELD == PANELS || (HELD >= 2 && HELD < PANELS), "a panel is brought while the one behind it is multiplied");
    static_assert(N % 8 == 0 && SLOT % 16 == 0, "sums go in chunks of 16 bytes");

    u32 w, x, inbox, barriers;  // panels of the weight and of x; all blocks' sums of own rows; of each stage, of the sums
    float *factor, *marks;
    int rank, tile, first, last;  // of the cluster; rows that this block ends
    int row, far;                 // of the weight: its first, and from one box to the next

    __device__ Product(char* chip, const Map& x_map, const Map& weight, int rows) {
        u32 up = (1024 - shared_at(chip) % 1024) % 1024;
        w = shared_at(chip) + up;
        x = w + W_BYTES;
        inbox = x + X_BYTES;
        barriers = inbox + CL * SLOT;
        factor = reinterpret_cast<float*>(chip + up + W_BYTES + X_BYTES + CL * SLOT + BARRIERS);
        marks = factor + 64;
        rank = blockIdx.x % CL;
        tile = blockIdx.x / CL;
        int each = (rows + CL - 1) / CL;
        first = min(rank * each, rows);
        last = min(first + each, rows);
        if (threadIdx.x == 0) {
            fetch_map(weight);
            for (int stage = 0; stage < STAGES; ++stage) make_barrier(barriers + stage * 8, 2);  // its weights, its x
            make_barrier(sums(), 1);
            show_barriers();
            publish();  // to the copy engine too, which is started before the threads meet
            for (int stage = 0; stage < STAGES; ++stage) expect(barriers + stage * 8, EVERY * N * ROW);
            expect(sums(), CL * (last - first) * N * 2);
            fetch_map(x_map);
        }
    }

    __device__ void open() {  // once the weights are under way: all threads see the barriers
        __syncthreads();
        ready();
    }

    __device__ u32 sums() const { return barriers + STAGES * 8; }

    // The tile's rows of the weight: BOXES boxes a panel, `apart` rows of the weight apart. By one thread.
    template <int BOXES>
    __device__ void bring_weights(const Map& map, int begin, int apart = 0) {
        row = begin, far = apart;
        for (int p = 0; p < HELD; ++p) bring_panel<BOXES>(map, p);
        for (int p = HELD; p < PANELS; ++p)
            for (int box = 0; box < BOXES; ++box) ask_ahead(map, rank * K + p * 64, row + box * far);
    }

    template <int BOXES>
    __device__ void bring_panel(const Map& map, int p) {
        for (int box = 0; box < BOXES; ++box)
            bring(w + (p % HELD * N + box * (N / BOXES)) * ROW, map, rank * K + p * 64, row + box * far, barriers + p / EVERY * 8);
    }

    __device__ void bring_rows(const Map& map) {
        if (threadIdx.x > 0) return;
        for (int stage = 0; stage < STAGES; ++stage) {
            expect(barriers + stage * 8, EVERY * ROWS * ROW);
            for (int p = stage * EVERY; p < (stage + 1) * EVERY; ++p)
                bring(x + p * ROWS * ROW, map, rank * K + p * 64, 0, barriers + stage * 8);
        }
    }

    // All blocks' sums of this block's rows come into the inbox.
    template <int BOXES>
    __device__ void multiply(const Map& weight, int rows) {
        float sum[N / GROUPS / 2];
        u32 mine = (threadIdx.x / 128) * (N / GROUPS) * ROW;
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            if (p % EVERY == 0) wait_bytes(barriers + p / EVERY * 8);
            if (p == 0) STAMP(3);
            open_products();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                Mma<N / GROUPS>::add(sum, panels(x + p * ROWS * ROW + k * 32), panels(w + p % HELD * N * ROW + mine + k * 32), p + k > 0);
            commit_products();
            if (p > 0 && p - 1 + HELD < PANELS) {  // the last panel's place is free: all have multiplied it
                wait_products<1>();
                __syncthreads();
                if (threadIdx.x == 0) bring_panel<BOXES>(weight, p - 1 + HELD);
            }
        }
        wait_products<0>();
        STAMP(4);
        int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane / 4, each = (rows + CL - 1) / CL;
        int upper = min(r / each, CL - 1), lower = min((r + 8) / each, CL - 1);
        u32 at = inbox + rank * SLOT + threadIdx.x / 128 * (N / GROUPS) * 2;
        u32 to[2] = {in_block(at + r % each * PITCH * 2, upper), in_block(at + (r + 8) % each * PITCH * 2, lower)};
        u32 told[2] = {in_block(sums(), upper), in_block(sums(), lower)};
        constexpr int CHUNKS = N / GROUPS / 8;  // of 8 outputs of a row: four threads hold two each
        meet();                                 // all blocks live, and their barriers
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            bool there = r + h * 8 < rows;
            auto word = [&](int chunk) { return pack(sum[4 * chunk + 2 * h], sum[4 * chunk + 2 * h + 1]); };
#pragma unroll
            for (int j = 0; j + 4 <= CHUNKS; j += 4) {
                uint4 whole = gather(word(j), word(j + 1), word(j + 2), word(j + 3));
                if (there) send16(to[h] + (j + lane % 4) * 16, whole, told[h]);
            }
#pragma unroll
            for (int j = CHUNKS / 4 * 4; j < CHUNKS; ++j)
                if (there) send1(to[h] + j * 16 + lane % 4 * 4, word(j), told[h]);
        }
        wait_bytes(sums());
        __syncthreads();  // and the factors are there
        STAMP(5);
    }

    // Four outputs of one of this block's rows, all inputs.
    __device__ float4 total(int r, int c) {
        u32 at = inbox + (r * PITCH + c) * 2;
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < CL; ++i) {
            uint2 part = read8(at + i * SLOT);
            sum.x += low_of(part.x), sum.y += high_of(part.x), sum.z += low_of(part.y), sum.w += high_of(part.y);
        }
        return sum;
    }

    // 1 / rms of this block's rows. :param squares: [rows, parts].
    __device__ void bring_factors(const float* squares, int parts, float eps) {
#pragma unroll
        for (int i = 0; i < (EACH * 16 + THREADS - 1) / THREADS; ++i) {
            int r = threadIdx.x / 16 + i * (THREADS / 16);
            float sum = 0;
            if (first + r < last)
                for (int part = threadIdx.x % 16; part < parts; part += 16) sum += squares[(first + r) * parts + part];
#pragma unroll
            for (int far = 8; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
            if (threadIdx.x % 16 == 0 && first + r < last) factor[r] = rsqrtf(sum / (K * CL) + eps);
        }
    }
};

// QKV: x [rows, K * CL] before its factor; queries [B, heads, tokens, 2 * HALF]; K and V into their slab. A tile holds N / 2
// rotary pairs of one head: their first columns, then their second.
template <int N, int K, int CL, int GROUPS, int ROWS, int HELD, int HALF>
__global__ void __launch_bounds__(128 * GROUPS) project_rotate(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const float* squares, const float* shift, const float* cos,
    const float* sin, u16* query, Slab keys, Slab values, const i64* start, int rows,
    int tokens, int heads, int kv_heads, int columns, int parts, float eps) {
    static_assert(HALF % (N / 2) == 0, "a tile's pairs are of one head");
    extern __shared__ char chip[];
    start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, HELD> p(chip, x, weight, rows);
    int head = p.tile / (HALF / (N / 2)), begin = p.tile % (HALF / (N / 2)) * (N / 2);
    if (threadIdx.x == 0) p.template bring_weights<2>(weight, head * 2 * HALF + begin, HALF);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 8) + p.THREADS - 1) / p.THREADS;
    float4 c[ITEMS], s[ITEMS], low_shift[ITEMS] = {}, high_shift[ITEMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, r = p.first + item / (N / 8), at = begin + item % (N / 8) * 4;
        if (r >= p.last) continue;
        c[i] = load4(cos + r * HALF + at), s[i] = load4(sin + r * HALF + at);
        if (shift) low_shift[i] = load4(shift + head * 2 * HALF + at), high_shift[i] = load4(shift + head * 2 * HALF + HALF + at);
    }
    STAMP(1);
    wait_for_last();
    STAMP(2);
    p.bring_rows(x);
    p.bring_factors(squares, parts, eps);
    p.template multiply<2>(weight, rows);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 8), r = p.first + own, at = begin + item % (N / 8) * 4;
        if (r >= p.last) continue;
        float4 a = p.total(own, item % (N / 8) * 4), b = p.total(own, N / 2 + item % (N / 8) * 4), m = low_shift[i], n = high_shift[i];
        float f = p.factor[own];
        a = {a.x * f + m.x, a.y * f + m.y, a.z * f + m.z, a.w * f + m.w};
        b = {b.x * f + n.x, b.y * f + n.y, b.z * f + n.z, b.w * f + n.w};
        float4 low = a, high = b;
        if (head < heads + kv_heads) {
            low = {a.x * c[i].x - b.x * s[i].x, a.y * c[i].y - b.y * s[i].y, a.z * c[i].z - b.z * s[i].z, a.w * c[i].w - b.w * s[i].w};
            high = {b.x * c[i].x + a.x * s[i].x, b.y * c[i].y + a.y * s[i].y, b.z * c[i].z + a.z * s[i].z, b.w * c[i].w + a.w * s[i].w};
        }
        int batch = r / tokens, token = r % tokens;
        u16* to;
        if (head < heads) {
            to = query + (static_cast<i64>(batch * heads + head) * tokens + token) * 2 * HALF + at;
        } else {
            i64 column = start[batch] + token;
            if (column < 0 || column >= columns) continue;  // a broken promise must not reach memory beside the slab
            const Slab& slab = head < heads + kv_heads ? keys : values;
            int of = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
            to = slab.at + batch * slab.batch + of * slab.head + column * slab.column + at;
        }
        *reinterpret_cast<uint2*>(to) = {pack(low.x, low.y), pack(low.z, low.w)};
        *reinterpret_cast<uint2*>(to + HALF) = {pack(high.x, high.y), pack(high.z, high.w)};
    }
    STAMP(6);
}

__device__ __forceinline__ float gelu(float g) {  // tanh form: g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
    float u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return __fdividef(g, 1.0f + power_of_two(fminf(-2.8853900817779268f * u, 126.0f)));
}

// Gate and up projection and gated GELU: out [rows, outputs]. A tile holds N / 2 gates, then their ups.
template <int N, int K, int CL, int GROUPS, int ROWS, int HELD>
__global__ void __launch_bounds__(128 * GROUPS) gated_up(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const float* squares, const float* shift, u16* out,
    int rows, int outputs, int parts, float eps) {
    extern __shared__ char chip[];
    start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, HELD> p(chip, x, weight, rows);
    int begin = p.tile * (N / 2);
    if (threadIdx.x == 0) p.template bring_weights<2>(weight, begin, outputs);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 8) + p.THREADS - 1) / p.THREADS;
    float4 m[ITEMS] = {}, n[ITEMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int o = begin + (threadIdx.x + i * p.THREADS) % (N / 8) * 4;
        if (shift && o < outputs) m[i] = load4(shift + o), n[i] = load4(shift + outputs + o);
    }
    STAMP(1);
    wait_for_last();
    STAMP(2);
    p.bring_rows(x);
    p.bring_factors(squares, parts, eps);
    p.template multiply<2>(weight, rows);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 8), r = p.first + own, at = item % (N / 8) * 4;
        if (r >= p.last || begin + at >= outputs) continue;
        float4 a = p.total(own, at), b = p.total(own, N / 2 + at);
        float f = p.factor[own];
        float4 v = {gelu(a.x * f + m[i].x) * (b.x * f + n[i].x), gelu(a.y * f + m[i].y) * (b.y * f + n[i].y),
                    gelu(a.z * f + m[i].z) * (b.z * f + n[i].z), gelu(a.w * f + m[i].w) * (b.w * f + n[i].w)};
        *reinterpret_cast<uint2*>(out + static_cast<i64>(r) * outputs + begin + at) = {pack(v.x, v.y), pack(v.z, v.w)};
    }
    STAMP(6);
}

// total = stream + gate * (x @ weight.T); scaled = total * (1 + scale); squares [rows, tiles]: sums of total * total.
template <int N, int K, int CL, int GROUPS, int ROWS, int HELD>
__global__ void __launch_bounds__(128 * GROUPS) add_product(
    const __grid_constant__ Map x, const __grid_constant__ Map weight, const u16* stream, const float* gate, const float* scale,
    u16* total, u16* scaled, float* squares, int rows, int outputs) {
    extern __shared__ char chip[];
    start_next();
    STAMP(0);
    Product<N, K, CL, GROUPS, ROWS, HELD> p(chip, x, weight, rows);
    int begin = p.tile * N;
    if (threadIdx.x == 0) p.template bring_weights<1>(weight, begin);
    p.open();
    constexpr int ITEMS = (p.EACH * (N / 4) + p.THREADS - 1) / p.THREADS;
    float4 open[ITEMS], gain[ITEMS];
    uint2 before[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int o = begin + (threadIdx.x + i * p.THREADS) % (N / 4) * 4;
        if (o >= outputs) continue;
        gain[i] = load4(scale + o);
        if (gate) open[i] = load4(gate + o);
    }
    STAMP(1);
    wait_for_last();
    STAMP(2);
    p.bring_rows(x);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, r = p.first + item / (N / 4), o = begin + item % (N / 4) * 4;
        if (r < p.last && o < outputs) before[i] = *reinterpret_cast<const uint2*>(stream + static_cast<i64>(r) * outputs + o);
    }
    p.template multiply<1>(weight, rows);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        int item = threadIdx.x + i * p.THREADS, own = item / (N / 4), r = p.first + own, o = begin + item % (N / 4) * 4;
        if (r >= p.last) continue;
        float square = 0;
        if (o < outputs) {
            float4 v = p.total(own, item % (N / 4) * 4), g = gain[i];
            v = {rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w)};
            if (gate)  // rounded where the reference rounds: the product, the gate, their product
                v = {rounded(rounded(open[i].x) * v.x), rounded(rounded(open[i].y) * v.y), rounded(rounded(open[i].z) * v.z),
                     rounded(rounded(open[i].w) * v.w)};
            uint2 after = {pack(low_of(before[i].x) + v.x, high_of(before[i].x) + v.y), pack(low_of(before[i].y) + v.z, high_of(before[i].y) + v.w)};
            v = {low_of(after.x), high_of(after.x), low_of(after.y), high_of(after.y)};
            square = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            i64 at = static_cast<i64>(r) * outputs + o;
            *reinterpret_cast<uint2*>(total + at) = after;
            *reinterpret_cast<uint2*>(scaled + at) = {pack(v.x * (1.0f + g.x), v.y * (1.0f + g.y)), pack(v.z * (1.0f + g.z), v.w * (1.0f + g.w))};
        }
        p.marks[item] = square;
    }
    __syncthreads();
    int r = p.first + threadIdx.x;
    if (r < p.last) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) sum += p.marks[threadIdx.x * (N / 4) + i];
        squares[r * (gridDim.x / CL) + p.tile] = sum;
    }
    STAMP(6);
}
